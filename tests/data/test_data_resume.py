"""Resuming: an interrupted run sees exactly the samples that the uninterrupted one would have seen next."""

import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from olmoe_lightning.data import DataError, TokenDataModule, TokenSource

S = 8
ROWS = 84  # with a batch of 4: 21 batches per epoch


class Recorder(LightningModule):
    """Learns nothing, remembers the rows of every training batch."""

    def __init__(self, early_estimate=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.early_estimate, self.seen = early_estimate, []

    def training_step(self, batch, batch_idx):
        self.seen.append((batch["input_ids"][:, 0] + 128 * batch["source_ids"]).tolist())
        return self.weight * 0.0

    def validation_step(self, batch, batch_idx):
        assert len(batch["labels"]) == 4

    def configure_optimizers(self):
        if self.early_estimate:
            # Lightning then makes the loaders before the checkpoint's progress is restored.
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(Callback):
    """Writes a checkpoint where ModelCheckpoint does, and optionally dies."""

    def __init__(self, batch, path, die=False):
        self.batch, self.path, self.die = batch, path, die

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if len(module.seen) == self.batch:
            trainer.save_checkpoint(self.path)
            if self.die:
                raise ZeroDivisionError


class Ranked(Trainer):
    """One of several data-parallel ranks, as far as the data are concerned."""

    ranks, rank = 1, 0

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": self.ranks, "rank": self.rank}


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.fixture
def sources(tmp_path):
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.repeat(np.arange(ROWS // 2), S).astype(np.uint16))
    return [TokenSource(str(tmp_path / "a.npy"), 1.0), TokenSource(str(tmp_path / "b.npy"), 2.0)]


def run(
    sources, *callbacks, batches=50, accumulate=1, ckpt_path=None, ranks=1, rank=0, module=None, data=None, **kwargs
):
    """Train ``batches`` batches in all (several epochs) and return the rows of each batch that was trained here."""
    module = module or Recorder()
    data = data or TokenDataModule(sources, **{"seq_len": S, "batch_size": 4, **kwargs})
    trainer = Ranked(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=-1,
        max_steps=-(-batches // accumulate),
        accumulate_grad_batches=accumulate,
        callbacks=list(callbacks),
    )
    trainer.ranks, trainer.rank = ranks, rank
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module.seen


@pytest.fixture
def uninterrupted(sources):
    return run(sources)


# 5 and 40: in the middle of an epoch; 21: the last batch of one; 22: the first of the next; 49: all but one.
@pytest.mark.parametrize(("num_workers", "stop"), [(0, 5), (0, 21), (0, 22), (0, 40), (0, 49), (2, 5), (2, 21)])
def test_resumed_run_sees_the_same_rows(sources, uninterrupted, tmp_path, num_workers, stop):
    with pytest.raises(ZeroDivisionError):
        run(sources, SaveAfter(stop, tmp_path / "c.ckpt", die=True), num_workers=num_workers)
    rest = run(sources, ckpt_path=tmp_path / "c.ckpt", num_workers=num_workers)
    assert rest == uninterrupted[stop:]


def test_the_comparison_can_fail(sources, uninterrupted, tmp_path):
    class Forgetful(TokenDataModule):
        """Without a position, a shuffling loader replays the epoch."""

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

        def train_dataloader(self):
            loader = super().train_dataloader()
            loader.sampler.first_sample = lambda epoch: epoch * 84
            return loader

    def forgetful():
        return Forgetful(sources, seq_len=S, batch_size=4)

    assert run(sources, data=forgetful()) == uninterrupted  # as long as nothing happens
    run(sources, SaveAfter(5, tmp_path / "c.ckpt"), data=forgetful())
    rest = run(sources, ckpt_path=tmp_path / "c.ckpt", data=forgetful())
    assert rest != uninterrupted[5:]
    assert rest[:5] == uninterrupted[:5]


@pytest.mark.parametrize("stop", [6, 21, 30])
def test_resumed_run_with_accumulation_sees_the_same_rows(sources, tmp_path, stop):
    # 21 batches, accumulated by 3: 7 steps per epoch
    whole = run(sources, accumulate=3, batches=48)
    run(sources, SaveAfter(stop, tmp_path / "c.ckpt"), accumulate=3, batches=stop)
    assert run(sources, ckpt_path=tmp_path / "c.ckpt", accumulate=3, batches=48) == whole[stop:]


def test_resuming_twice_and_training_longer_continue_the_same_stream(sources, uninterrupted, tmp_path):
    first = run(sources, SaveAfter(7, tmp_path / "1.ckpt"), batches=7)
    second = run(sources, SaveAfter(18, tmp_path / "2.ckpt"), batches=25, ckpt_path=tmp_path / "1.ckpt")
    third = run(sources, batches=70, ckpt_path=tmp_path / "2.ckpt")
    assert first + second == uninterrupted[:25]
    assert first + second + third == run(sources, batches=70)
    assert run(sources, batches=70)[:50] == uninterrupted


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_is_exact_when_the_steps_were_estimated_early(sources, uninterrupted, tmp_path, num_workers):
    run(sources, SaveAfter(5, tmp_path / "c.ckpt"), batches=5, module=Recorder(early_estimate=True))
    module = Recorder(early_estimate=True)
    rest = run(sources, ckpt_path=tmp_path / "c.ckpt", module=module, num_workers=num_workers)
    assert rest == uninterrupted[5:]


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_ranks_continues_the_same_global_batches(sources, uninterrupted, tmp_path, old, new):
    run(sources, SaveAfter(5, tmp_path / "c.ckpt"), batches=5, ranks=old, batch_size=4 // old)
    parts = [
        run(sources, ckpt_path=tmp_path / "c.ckpt", ranks=new, rank=rank, batch_size=4 // new, batches=30)
        for rank in range(new)
    ]
    assert [flat(batch) for batch in zip(*parts, strict=True)] == uninterrupted[5:30]


def test_another_batch_size_continues_after_the_consumed_samples(sources, uninterrupted, tmp_path):
    run(sources, SaveAfter(5, tmp_path / "c.ckpt"), batches=5)
    run(sources, SaveAfter(3, tmp_path / "d.ckpt"), batches=8, batch_size=2, ckpt_path=tmp_path / "c.ckpt")
    rest = run(sources, batches=30, ckpt_path=tmp_path / "d.ckpt")
    assert flat(rest)[:80] == flat(uninterrupted)[20 + 6 :][:80]


def test_position_counts_trained_samples_only(sources, tmp_path):
    class Interrupted(Recorder):
        def training_step(self, batch, batch_idx):
            if len(self.seen) == 6:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    data = TokenDataModule(sources, seq_len=S, batch_size=4, num_workers=2)
    with pytest.raises(ZeroDivisionError):
        run(sources, data=data, module=Interrupted())
    # The seventh batch was read, and the workers read ahead; neither was trained on.
    assert data.consumed_samples == 24


def test_validation_and_new_runs_do_not_disturb_the_position(sources, uninterrupted, tmp_path):
    data = TokenDataModule(sources, val=sources, seq_len=S, batch_size=4)
    assert run(sources, SaveAfter(5, tmp_path / "c.ckpt"), data=data) == uninterrupted
    assert data.consumed_samples == 200
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.validate(Recorder(), data, ckpt_path=tmp_path / "c.ckpt", verbose=False)
    assert run(sources, data=data, batches=5) == uninterrupted[:5]  # a fresh run starts at the begin


def test_epochs_of_limited_length_go_on_in_the_stream(sources, uninterrupted):
    module, data = Recorder(), TokenDataModule(sources, seq_len=S, batch_size=4)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=3,
        limit_train_batches=4, reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    trainer.fit(module, data)
    assert module.seen == uninterrupted[:12]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"seed: 0 → 1"),
        ({"seq_len": 4}, r"seq_len: 8 → 4"),
        ({"packing": "documents"}, r"packing: concat → documents"),
    ],
)
def test_another_stream_is_refused_with_the_difference(sources, tmp_path, change, message):
    run(sources, SaveAfter(5, tmp_path / "c.ckpt"), batches=5)
    with pytest.raises(DataError, match=message):
        run(sources, ckpt_path=tmp_path / "c.ckpt", **change)
    with pytest.warns(UserWarning, match=r"Going on at sample 20 of the new stream"):
        run(sources, ckpt_path=tmp_path / "c.ckpt", batches=6, strict_resume=False, **change)


def test_other_data_or_weights_are_refused_and_moved_files_are_not(sources, uninterrupted, tmp_path):
    run(sources, SaveAfter(5, tmp_path / "c.ckpt"), batches=5)
    heavier = [TokenSource(sources[0].path, 5.0), sources[1]]
    with pytest.raises(DataError, match=r"weight of source 0: 1\.0 → 5\.0"):
        run(heavier, ckpt_path=tmp_path / "c.ckpt")
    moved = [TokenSource(str((tmp_path / "a.npy").rename(tmp_path / "moved.npy")), 1.0), sources[1]]
    assert run(moved, ckpt_path=tmp_path / "c.ckpt") == uninterrupted[5:]
    np.save(tmp_path / "moved.npy", np.arange(ROWS // 2 * S).astype(np.uint16) % 200)
    with pytest.raises(DataError, match=r"file 0 of source 0: 336 tokens, digest \w+ → 336 tokens"):
        run(moved, ckpt_path=tmp_path / "c.ckpt")


def test_lightning_keeps_our_sampler_and_does_not_warn(sources, tmp_path, recwarn):
    run(sources, SaveAfter(5, tmp_path / "c.ckpt"), batches=5)
    run(sources, ckpt_path=tmp_path / "c.ckpt", batches=8)
    assert not [w for w in recwarn if "not resumable" in str(w.message)]
    data = TokenDataModule(sources, seq_len=S)
    data.setup()
    assert isinstance(data.train_dataloader(), DataLoader)
    assert isinstance(data.train_dataloader().sampler, DistributedSampler)
