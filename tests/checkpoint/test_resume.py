"""A resumed run is the uninterrupted one: data, random numbers, schedule, callbacks and counters, bit for bit."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE, TokenDataModule, TokenSource
from olmoe_lightning.checkpoint.meta import KEY, read_meta
from olmoe_lightning.training import loader

CONFIG = ModelConfig(
    vocab_size=264,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    top_k=2,
    expert_hidden=8,
    max_seq_len=16,
    router_jitter=0.1,  # takes random numbers in every step
    selection_bias=True,
    bias_update_rate=0.01,
)
S = 8


class Noisy(OLMoE):
    """Takes numbers of each generator in every step, and remembers everything that a step depends on."""

    def __init__(self, **options):
        super().__init__(CONFIG, **options)
        self.seen = []

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        noise = torch.rand(()).item(), float(np.random.rand()), random.random()
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((batch["input_ids"].tolist(), float(output["loss"]), lr, *noise))
        return output


class Interrupts(Callback):
    """Ends the run after some batches, where it has just been saved."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_end(self, trainer, pl_module, *_):
        if len(pl_module.seen) == self.batch:
            trainer.should_stop = True


class Counts(Callback):
    """A callback with a state of its own."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *_):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def run(folder, devices, expert, stop=None, ckpt_path=None, **options):
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    source = TokenSource(str(folder / "tokens.npy"))
    data = TokenDataModule([source], val=[source], seq_len=S, batch_size=4 // devices)
    counts = Counts()
    keep = ModelCheckpoint(folder / f"{devices}-{expert}", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MoEStrategy(expert_parallel_size=expert, **options),
        max_steps=18,
        callbacks=[
            keep,
            counts,
            EarlyStopping("val/loss", patience=9, strict=False),
            *([Interrupts(stop)] if stop else []),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
    )
    module = Noisy(schedule="cosine", warmup_steps=2)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    patience = next(c for c in trainer.callbacks if isinstance(c, EarlyStopping))
    return module.seen, counts.batches, trainer.current_epoch, float(patience.best_score)


@pytest.fixture
def folder(tmp_path):
    random_ids = np.random.default_rng(0).integers(1, 64, 32 * S + 1)  # 8 batches of 4 an epoch
    np.save(tmp_path / "tokens.npy", random_ids.astype(np.uint16))
    return tmp_path


# 3 and 11: in the middle of an epoch; 8: its last batch (Lightning does not make up for the validation after it);
# 9: the first of the next one. Data workers are in tests/data.
@pytest.mark.parametrize(
    ("expert", "stop"),
    [(2, 3), (1, 8), pytest.param(2, 9, marks=pytest.mark.parity), pytest.param(2, 11, marks=pytest.mark.parity)],
)
def test_an_interrupted_run_goes_on_bit_for_bit(workers, folder, expert, stop):
    whole = workers(2).run(run, folder, 2, expert)
    rest = workers(2).run(run, folder, 2, expert, ckpt_path=folder / f"2-{expert}" / f"step={stop}.ckpt")
    for ours, expected in zip(rest, whole, strict=True):
        assert ours[0] == expected[0][stop:]
        assert ours[1:] == expected[1:]


def test_the_comparison_sees_other_random_numbers(workers, folder):
    """The control of the test above: without the generators' states only data and schedule are the same."""
    whole = workers(2).run(run, folder, 2, 2)
    rest = workers(2).run(run_without_random_state, folder, folder / "2-2" / "step=3.ckpt")
    for ours, expected in zip(rest, whole, strict=True):
        assert [step[0] for step in ours[0]] == [step[0] for step in expected[0][3:]]
        assert all(step[3:] != other[3:] for step, other in zip(ours[0], expected[0][3:], strict=True))


def run_without_random_state(folder, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "restore_random_state", lambda *_: None)
        return run(folder, 2, 2, ckpt_path=path)


def test_another_number_of_processes_starts_numbers_that_depend_on_checkpoint_and_rank_alone(workers, folder):
    run(folder, 1, 1, stop=3)
    path = folder / "1-1" / "step=3.ckpt"
    first, second = (workers(2).run(run, folder, 2, 1, ckpt_path=path) for _ in range(2))
    assert first == second
    noises = [[step[3:] for step in rank[0]] for rank in first]
    assert noises[0] != noises[1]


class Breaks(Noisy):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if len(self.seen) == 2:
            output["loss"] = output["loss"] * float("nan")
        return output


def count_skipped(folder, ckpt_path=None):
    source = TokenSource(str(folder / "tokens.npy"))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MoEStrategy(),
        max_steps=5 if ckpt_path else 3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Noisy() if ckpt_path else Breaks()
    trainer.fit(module, TokenDataModule([source], seq_len=S, batch_size=4), ckpt_path=ckpt_path)
    if not ckpt_path:
        trainer.save_checkpoint(folder / "skipped.ckpt")
    return trainer.strategy.skipped_steps


@pytest.mark.filterwarnings("ignore:Skipped optimizer step")
def test_skipped_steps_are_counted_on(folder):
    assert count_skipped(folder) == 1
    assert read_meta(folder / "skipped.ckpt")[KEY]["skipped_steps"] == 1
    assert count_skipped(folder, folder / "skipped.ckpt") == 1
