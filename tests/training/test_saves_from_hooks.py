"""A save that is called from any hook, at any time of a run, is complete when the run is over."""

import gc
import os
import sys
import threading

import pytest
import torch
from lightning.pytorch import Callback
from strategy_lab import SMALL_BUCKETS, WithExperts, quiet, rank_and_size
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy

HOOKS = [
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
    "behind fit",
]
LATE = ["on_validation_end", "on_train_end", "on_fit_end", "teardown"]
MODES = {
    "sync": {},
    "async": {"async_save": True},
    "overlap": {"async_save": "overlap"},
    "full": {"state_dict_type": "full"},
}


class Module(WithExperts):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx))


class Saves(Callback):
    """Saves the first time that a hook is called, and notes the weights."""

    def __init__(self, hook, path):
        self.path, self.weights = path, None
        setattr(self, hook, self.save)

    def save(self, trainer, *args, **kwargs):
        if self.weights is None:
            trainer.strategy.wait_for_weights()
            self.weights = {
                name: value.detach().clone() for name, value in trainer.lightning_module.state_dict().items()
            }
            trainer.save_checkpoint(self.path)


def batches():
    return DataLoader(
        [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)], batch_size=None
    )


def trainer_of(mode, callbacks=(), **options):
    strategy = MoEStrategy(bucket_megabytes=SMALL_BUCKETS, **MODES[mode], **options)
    return quiet(strategy, callbacks=list(callbacks), num_sanity_val_steps=1, max_epochs=2)


def save_and_load(hooks, mode, folder, **options):
    """Hooks whose checkpoint does not hold the weights of the moment."""
    wrong = []
    for hook in hooks:
        path = os.path.join(folder, f"{hook}-{mode}.ckpt")
        saves = Saves(hook, path)
        trainer = trainer_of(mode, [saves], **options)
        trainer.fit(Module(), batches(), batches())
        if hook == "behind fit":
            saves.save(trainer)
        if saves.weights is None:
            wrong.append(f"{hook} was not called")
            continue
        fresh = Module()
        trainer_of("sync", **options).validate(fresh, batches(), ckpt_path=path, verbose=False)
        there = fresh.state_dict()
        wrong += [f"{hook}: {name}" for name, value in saves.weights.items() if not torch.equal(value, there[name])][:1]
        if hook in LATE:
            trainer_of("sync", **options).fit(Module(), batches(), batches(), ckpt_path=path)
    return wrong


@pytest.mark.parametrize(
    "mode", ["async", "full", *(pytest.param(m, marks=pytest.mark.parity) for m in ("sync", "overlap"))]
)
def test_a_save_from_any_hook_is_whole(mode, tmp_path):
    assert save_and_load(HOOKS, mode, tmp_path) == []


@pytest.mark.parametrize(
    ("mode", "size", "hooks"),
    [
        ("async", 2, LATE),
        *(pytest.param(mode, size, HOOKS, marks=pytest.mark.parity) for mode in MODES for size in (1, 2)),
    ],
)
def test_a_save_from_any_hook_is_whole_on_two_processes(mode, size, hooks, workers, tmp_path):
    assert workers(2).run(save_and_load, hooks, mode, tmp_path, expert_parallel_size=size) == [[], []]


def left_over(fits, mode, folder):
    """Open files and threads of this process after some runs, each with a strategy of its own."""
    for number in range(fits):
        trainer = trainer_of(
            mode,
            [Saves("on_train_end", os.path.join(folder, f"{number}.ckpt"))],
            expert_parallel_size=rank_and_size()[1],
        )
        trainer.fit(Module(), batches(), batches())
    del trainer
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc shows")
@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.parity)])
def test_runs_leave_no_open_files_or_threads(mode, workers, tmp_path):
    run = workers(2).run
    for few, many in zip(
        run(left_over, 2, mode, tmp_path / "a"), run(left_over, 20, mode, tmp_path / "b"), strict=True
    ):
        assert all(after <= before for after, before in zip(many, few, strict=True)), (few, many)


def open_file(folder):
    before = len(os.listdir("/proc/self/fd"))
    file = open(os.path.join(folder, "file"), "w")  # noqa: SIM115
    return len(os.listdir("/proc/self/fd")) - before, file


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc shows")
def test_the_count_sees_an_open_file(tmp_path):
    assert open_file(tmp_path)[0] == 1
