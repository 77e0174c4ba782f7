"""Loaders, samplers, data modules, and how batches reach a module."""

import torch
from contract import row
from laboratory import ROWS, Ordinary, Points
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

GROUP = "Data"


class Noting(Ordinary):
    """Keeps the sum of the rows of each global batch, and where it came from."""

    def __init__(self, lab):
        super().__init__()
        self.lab, self.seen = lab, []

    def note(self, x, *more):
        self.seen.append((self.lab.everywhere(x.float()).sum(0), *more))

    def training_step(self, batch, batch_idx):
        self.note(batch[0], batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.note(batch[0], batch_idx, dataloader_idx)
        super().validation_step(batch, batch_idx, dataloader_idx)


def noted(lab, **options):
    module = Noting(lab)
    return {**lab.fit(module, **options), "seen": module.seen}


def other_orders(lab, **options):
    seen = []

    class Sums(Ordinary):
        def training_step(self, batch, batch_idx):
            seen.append(lab.everywhere(batch[0].float()).sum(0))
            return super().training_step(batch, batch_idx)

    lab.fit(Sums(), train=DataLoader(Points(4 * ROWS), batch_size=ROWS // lab.readers, **options), max_epochs=2)
    first, second = torch.stack(seen[:4]), torch.stack(seen[4:])
    return {"rows": [first.sum(0), second.sum(0)], "batches": len(seen)}


@row(GROUP, "the distributed sampler is put in: each sample once in an epoch", quick=True)
def _(lab):
    return other_orders(lab)


@row(GROUP, "`shuffle=True`: each sample once in an epoch")
def _(lab):
    return other_orders(lab, shuffle=True)


@row(GROUP, "`use_distributed_sampler=False` with a sampler of one's own")
def _(lab):
    data = Points(4 * ROWS)

    class Own(Noting):
        def train_dataloader(self):
            return DataLoader(data, batch_size=ROWS // lab.readers, sampler=lab.sampler(data))

    module, trainer = Own(lab), lab.trainer(use_distributed_sampler=False)
    trainer.fit(module)
    return {**lab.seen(trainer), "seen": module.seen}


@row(GROUP, "a batch sampler of one's own")
def _(lab):
    data = Points(4 * ROWS)
    sampler = BatchSampler(lab.sampler(data), ROWS // lab.readers, drop_last=True)
    return noted(lab, train=DataLoader(data, batch_sampler=sampler), use_distributed_sampler=False)


@row(GROUP, "`RandomSampler` with a generator of one seed")
def _(lab):
    sampler = RandomSampler(Points(4 * ROWS), generator=torch.Generator().manual_seed(3))
    return other_orders(lab, sampler=sampler)


@row(GROUP, "`drop_last=True`")
def _(lab):
    data = Points(3 * ROWS + 2)
    loader = DataLoader(data, ROWS // lab.readers, sampler=lab.sampler(data), drop_last=True)
    return noted(lab, train=loader)


class Stream(IterableDataset):
    """Each reader takes its rows of each batch."""

    def __init__(self, lab, batches=4):
        self.data, self.readers, self.first = Points(batches * ROWS), lab.readers, lab.rank % lab.readers

    def __iter__(self):
        for index in range(self.first, len(self.data), self.readers):
            yield self.data[index]


class SizedStream(Stream):
    def __len__(self):
        return len(self.data) // self.readers


def stream(lab, kind=Stream):
    return DataLoader(kind(lab), batch_size=ROWS // lab.readers)


@row(GROUP, "`IterableDataset` without a length")
def _(lab):
    return noted(lab, train=stream(lab), max_epochs=2)


@row(GROUP, "`IterableDataset` with a length")
def _(lab):
    return noted(lab, train=stream(lab, SizedStream))


@row(GROUP, "`IterableDataset` for validation, with `val_check_interval`")
def _(lab):
    return noted(lab, train=stream(lab), val=stream(lab), val_check_interval=2)


@row(GROUP, "`num_workers`, `persistent_workers`")
def _(lab):
    return noted(lab, train=lab.loader(num_workers=1, persistent_workers=True), max_epochs=2)


class Pairs(Noting):
    def training_step(self, batch, batch_idx, dataloader_idx=0):
        batch = batch["a"] if isinstance(batch, dict) else batch
        if isinstance(batch[0], list | tuple):
            batch = batch[0]
        return super().training_step(batch, batch_idx)


def combined(lab, mode):
    module = Pairs(lab)
    loaders = {"a": lab.loader(3), "b": lab.loader(2, first=1)}
    found = lab.fit(module, train=CombinedLoader(loaders, mode))
    return {**found, "seen": module.seen}


@row(GROUP, "`CombinedLoader('min_size')`")
def _(lab):
    return combined(lab, "min_size")


@row(GROUP, "`CombinedLoader('max_size_cycle')`")
def _(lab):
    return combined(lab, "max_size_cycle")


@row(GROUP, "several training loaders in a dictionary")
def _(lab):
    module = Pairs(lab)
    return {**lab.fit(module, train={"a": lab.loader(3), "b": lab.loader(2, first=1)}), "seen": module.seen}


@row(GROUP, "`CombinedLoader('sequential')`  for training: Lightning's own error")
def _(lab):
    try:
        lab.fit(train=CombinedLoader([lab.loader(2), lab.loader(1, first=1)], "sequential"))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": "none"}


@row(GROUP, "several validation loaders")
def _(lab):
    return noted(lab, val=[lab.loader(2, first=1), lab.loader(1, first=2)])


@row(GROUP, "a validation `CombinedLoader('max_size')`")
def _(lab):
    seen = []

    class Both(Ordinary):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            seen.append([part is None for part in batch])

    lab.fit(Both(), val=CombinedLoader([lab.loader(2, first=1), lab.loader(1, first=2)], "max_size"))
    return {"seen": seen}


@row(GROUP, "`reload_dataloaders_every_n_epochs`")
def _(lab):
    calls = []

    class Reloads(Noting):
        def train_dataloader(self):
            calls.append(self.trainer.current_epoch)
            return lab.loader(2, first=len(calls))

    module = Reloads(lab)
    trainer = lab.trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3)
    trainer.fit(module)
    return {**lab.seen(trainer), "seen": module.seen, "calls": calls}


class Module(LightningDataModule):
    def __init__(self, lab):
        super().__init__()
        self.lab, self.calls, self.count = lab, [], 0

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def train_dataloader(self):
        self.calls.append("train_dataloader")
        return self.lab.loader(2)

    def val_dataloader(self):
        self.calls.append("val_dataloader")
        return self.lab.loader(1, first=1)

    def test_dataloader(self):
        return self.lab.loader(2, first=2)

    def predict_dataloader(self):
        return self.lab.loader(2, first=3)

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def on_exception(self, exception):
        self.calls.append(f"on_exception {type(exception).__name__}")

    def state_dict(self):
        return {"count": self.count + 5}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.calls.append(f"load {self.count}")


@row(GROUP, "a data module: its hooks and loaders", quick=True)
def _(lab):
    data, trainer, module = Module(lab), lab.trainer(max_epochs=2), Ordinary()
    trainer.fit(module, datamodule=data)
    found = lab.seen(trainer)
    tested = trainer.test(module, datamodule=data, verbose=False)
    predicted = [lab.everywhere(batch.float()) for batch in trainer.predict(module, datamodule=data)]
    calls = [call for call in data.calls if call != "prepare_data"]
    return {**found, "calls": calls, "prepared": lab.first(data.calls[0]), "tested": tested, "predicted": predicted}


@row(GROUP, "a data module's state in a checkpoint")
def _(lab):
    saves = ModelCheckpoint(lab.folder, filename="run")
    lab.trainer(saves, enable_checkpointing=True).fit(Ordinary(), datamodule=Module(lab))
    data, trainer = Module(lab), lab.trainer(max_epochs=2)
    trainer.fit(Ordinary(), datamodule=data, ckpt_path=lab.folder / "run.ckpt")
    return {**lab.seen(trainer), "calls": [call for call in data.calls if call != "prepare_data"]}


@row(GROUP, "`prepare_data` once for each machine, `prepare_data_per_node`")
def _(lab):
    calls = []

    class Prepares(Ordinary):
        prepare_data_per_node = True

        def prepare_data(self):
            calls.append("prepared")

    lab.fit(Prepares())
    return {"calls": lab.first(calls), "others": lab.rank == 0 or not calls}


@row(GROUP, "`transfer_batch_to_device`, `on_before_batch_transfer`, `on_after_batch_transfer`")
def _(lab):
    calls = []

    class Transfers(Ordinary):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            calls.append("before")
            return batch

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            calls.append("transfer")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            calls.append("after")
            return [batch[0] * 0.5, batch[1]]

    return {**lab.fit(Transfers()), "calls": calls}


@row(GROUP, "batches of dictionaries, with things that are not tensors")
def _(lab):
    class Dicts(Ordinary):
        def training_step(self, batch, batch_idx):
            assert batch["name"] == "points"
            return super().training_step(batch["pair"], batch_idx)

    def collate(items):
        return {"pair": torch.utils.data.default_collate(items), "name": "points"}

    return lab.fit(Dicts(), train=lab.loader(collate_fn=collate))


@row(GROUP, "`training_step(self, dataloader_iter)`")
def _(lab):
    class Pulls(Ordinary):
        def training_step(self, dataloader_iter):
            batch, *_ = next(dataloader_iter)
            sums = self.sums(batch)
            return {"loss": sums["loss"] / sums["num_tokens"], "num_tokens": sums["num_tokens"]}

    return lab.fit(Pulls())


class Batches:
    """Any iterable."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Stateful:
    """A loader that says where it is."""

    def __init__(self, lab):
        self.loader, self.position = list(lab.mine()), 0

    def __iter__(self):
        while self.position < len(self.loader):
            self.position += 1
            yield self.loader[self.position - 1]
        self.position = 0

    def __len__(self):
        return len(self.loader)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@row(GROUP, "a stateful loader goes on in the middle of an epoch")
def _(lab):
    saves = ModelCheckpoint(lab.folder, filename="run", every_n_train_steps=2, save_top_k=1, monitor=None)
    lab.fit(None, saves, train=Stateful(lab), max_steps=2, enable_checkpointing=True)
    module = Noting(lab)
    found = lab.fit(module, train=Stateful(lab), ckpt_path=lab.folder / "run.ckpt")
    return {**found, "seen": module.seen}


@row(GROUP, "any iterable as a loader")
def _(lab):
    return noted(lab, train=Batches(lab.mine()))


@row(GROUP, "batches of different sizes")
def _(lab):
    sizes = [len(x) // (1 + index % 2) for index, (x, _) in enumerate(lab.mine())]
    return noted(lab, train=Batches([(x[:n], y[:n]) for n, (x, y) in zip(sizes, lab.mine(), strict=True)]))


@row(GROUP, "no batches at all")
def _(lab):
    return {"steps": lab.fit(None, train=[])["steps"]}
