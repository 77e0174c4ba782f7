"""``self.log`` and its options, loggers, and torchmetrics."""

import csv

import torch
from contract import row
from laboratory import OURS, ROWS, Ordinary
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torchmetrics import MeanAbsoluteError, MeanMetric, MetricCollection, SumMetric

GROUP = "Logging and metrics"


class Logs(Ordinary):
    """Logs one value of each batch, in one way, from training and validation."""

    def __init__(self, lab, value=lambda x: x.mean(), **options):
        super().__init__()
        self.options, self.value = {"sync_dist": True, "batch_size": ROWS // lab.readers} | options, value

    def training_step(self, batch, batch_idx):
        self.log("value", self.value(batch[0].float()), **self.options)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        options = {name: value for name, value in self.options.items() if name != "logger"}
        self.log("val_value", self.value(batch[0].float()), **options)


class Keeps(Logger):
    """Keeps what it gets."""

    def __init__(self):
        super().__init__()
        self.seen, self.hyperparameters = [], []

    name, version = "keeps", 0

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, {name: value for name, value in metrics.items() if name not in OURS}))

    def log_hyperparams(self, params, *args, **kwargs):
        self.hyperparameters.append(dict(params))


def logged(lab, module=None, **options):
    keeps = Keeps()
    found = lab.fit(module, logger=keeps, max_epochs=2, **{"val": lab.loader(2, first=1)} | options)
    return {**found, "logged": lab.first(keeps.seen)}


def add(name, **options):
    @row(GROUP, f"`self.log({name})`")
    def _(lab):
        return logged(lab, Logs(lab, **options))


add("on_step=True", on_step=True)
add("on_epoch=True", on_step=False, on_epoch=True)
add("on_step=True, on_epoch=True", on_step=True, on_epoch=True)
add("prog_bar=True, logger=False", prog_bar=True, logger=False)
add("add_dataloader_idx=False", add_dataloader_idx=False)
add("reduce_fx='max'", reduce_fx="max", on_step=False, on_epoch=True, value=lambda x: torch.tensor(2.0))
add("reduce_fx='min'", reduce_fx="min", on_step=False, on_epoch=True, value=lambda x: torch.tensor(2.0))
add("batch_size=...", batch_size=3, on_step=False, on_epoch=True)


@row(GROUP, "`self.log(reduce_fx='sum')`, divided by the processes that see other samples")
def _(lab):
    scale = 1 / lab.column.processes
    return logged(lab, Logs(lab, lambda x: torch.tensor(scale), reduce_fx="sum", on_step=False, on_epoch=True))


@row(GROUP, "`self.log(rank_zero_only=True)`")
def _(lab):
    class Zero(Ordinary):
        def training_step(self, batch, batch_idx):
            self.log("index", float(batch_idx), rank_zero_only=True)
            return super().training_step(batch, batch_idx)

    found = logged(lab, Zero())
    return {"logged": found["logged"], "weights": found["weights"]}


@row(GROUP, "`self.log` of an int, a float and a tensor; `log_dict`")
def _(lab):
    class Kinds(Ordinary):
        def training_step(self, batch, batch_idx):
            self.log_dict({"int": 3, "float": 0.5, "tensor": torch.tensor(1.5)}, sync_dist=True)
            return super().training_step(batch, batch_idx)

    return logged(lab, Kinds())


@row(GROUP, "`self.log` in hooks of epochs")
def _(lab):
    class Epochs(Ordinary):
        def on_train_epoch_end(self):
            self.log("epoch_number", float(self.current_epoch))

        def on_validation_epoch_end(self):
            self.log("val_number", float(self.current_epoch))

    return logged(lab, Epochs())


@row(GROUP, "`log_every_n_steps`")
def _(lab):
    return logged(lab, log_every_n_steps=3)


@row(GROUP, "`logged_metrics`, `progress_bar_metrics`, `callback_metrics`")
def _(lab):
    trainer = lab.trainer()
    trainer.fit(Logs(lab, prog_bar=True), lab.loader(), lab.loader(1, first=1))
    return {
        kind: {name: float(value) for name, value in getattr(trainer, kind).items() if name not in OURS}
        for kind in ("logged_metrics", "progress_bar_metrics", "callback_metrics")
    }


@row(GROUP, "a key that is logged twice with other options")
def _(lab):
    class Twice(Ordinary):
        def training_step(self, batch, batch_idx):
            self.log("twice", 1.0)
            self.log("twice", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    try:
        lab.fit(Twice())
    except Exception as error:
        return {"error": type(error).__name__, "words": "different arguments" in str(error)}
    return {"error": "none"}


@row(GROUP, "`CSVLogger`", quick=True)
def _(lab):
    logger = CSVLogger(lab.folder, "run", "0")
    lab.fit(logger=logger, max_epochs=2, val=lab.loader(1, first=1))
    rows = None
    if lab.rank == 0:
        with open(lab.folder / "run/0/metrics.csv") as file:
            rows = [
                {name: float(value) for name, value in line.items() if value and name not in OURS}
                for line in csv.DictReader(file)
            ]
        rows = [line for line in rows if line.keys() - {"epoch", "step"}]
    return {"rows": rows}


@row(GROUP, "`TensorBoardLogger`")
def _(lab):
    try:
        logger = TensorBoardLogger(lab.folder, "run", "0")
    except ModuleNotFoundError:  # an option of Lightning's installation
        return {"installed": False}
    found = lab.fit(logger=logger)
    return {**found, "files": lab.first(len(list((lab.folder / "run/0").iterdir())))}


@row(GROUP, "several loggers")
def _(lab):
    one, other = Keeps(), Keeps()
    found = lab.fit(logger=[one, other])
    return {**found, "one": lab.first(one.seen), "other": lab.first(other.seen)}


@row(GROUP, "`save_hyperparameters` reaches the logger")
def _(lab):
    class Saved(Ordinary):
        def __init__(self, lr=0.1, name="ours"):
            super().__init__(lr)
            self.save_hyperparameters()

    keeps = Keeps()
    found = lab.fit(Saved(), logger=keeps)
    return {**found, "hyperparameters": lab.first(keeps.hyperparameters)}


class Measured(Ordinary):
    """Torchmetrics in a module: states of processes are joined when they are computed."""

    def __init__(self, metric, log_object=True):
        super().__init__()
        self.metric, self.log_object = metric, log_object

    def validation_step(self, batch, batch_idx):
        self.metric.update(*self.arguments(batch))
        if self.log_object:
            self.log("measured", self.metric, on_step=False, on_epoch=True)

    def arguments(self, batch):
        return self(batch[0]).float(), batch[1]

    def on_validation_epoch_end(self):
        if not self.log_object:
            self.log_dict({name: float(value) for name, value in self.metric.compute().items()})
            self.metric.reset()


@row(GROUP, "a torchmetrics object is logged")
def _(lab):
    return lab.fit(Measured(MeanAbsoluteError()), val=lab.loader(2, first=1), max_epochs=2)


@row(GROUP, "a `MetricCollection` is computed by hand")
def _(lab):
    metrics = MetricCollection({"mae": MeanAbsoluteError(), "again": MeanAbsoluteError()})
    return lab.fit(Measured(metrics, log_object=False), val=lab.loader(2, first=1), max_epochs=2)


@row(GROUP, "torchmetrics of training: `MeanMetric` by step and epoch")
def _(lab):
    class Trains(Ordinary):
        def __init__(self):
            super().__init__()
            self.mean_x = MeanMetric()

        def training_step(self, batch, batch_idx):
            self.mean_x.update(batch[0].float())
            self.log("mean_x", self.mean_x, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    return lab.fit(Trains(), max_epochs=2)


@row(GROUP, "torchmetrics' sums count each sample once", {})
def _(lab):
    class Sums(Ordinary):
        def __init__(self):
            super().__init__()
            self.total = SumMetric()

        def validation_step(self, batch, batch_idx):
            self.total.update(float(len(batch[0])) / (1 if lab.readers == lab.column.processes else 2))
            self.log("rows", self.total, on_step=False, on_epoch=True)

    return lab.fit(Sums(), val=lab.loader(3, first=1))


@row(GROUP, "`self.print`, `rank_zero_only`")
def _(lab):
    class Prints(Ordinary):
        def on_train_start(self):
            self.print("once")

    return lab.fit(Prints())
