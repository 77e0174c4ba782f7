"""One process of the checkpoint benchmark: saves and loads inside of ``Trainer.fit``, and without any of that."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _overhead import random_data, silent_trainer
from _timing import turn_order
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE
from olmoe_lightning.kernels import keep_freed_memory

STEPS = 2
"""Before the first save: the moments are there, and no step is the first one."""
ROWS = 16
"""Sequences of a process' step, of 32 tokens: long enough to copy meanwhile, far shorter than real steps."""
WAYS = ("plain", "sync", "async", "overlap")

Seconds = dict[str, list[float]]


class CheckpointSide:
    """Trains two steps of a model, and then saves or loads.

    Args:
        config: fields of :class:`ModelConfig`; the vocabulary must hold bytes and two special tokens.
        folder: for everything that is written; the same on all processes.
        processes: of the run.
        trained: a checkpoint after :data:`STEPS` steps is written there by :meth:`save`.
    """

    def __init__(self, config: dict[str, Any], folder: str, processes: int, trained: str = "trained.ckpt") -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        self._config = ModelConfig.from_dict(config)
        self._folder, self._processes = Path(folder), processes
        self._trained = self._folder / trained

    def save(self, rounds: int, bf16: bool = False) -> dict[str, Any]:
        """Time saves, one untimed before.

        Returns:
            ``seconds``: of each round until all processes are done, ``plain`` for ``torch.save`` and ``fsync`` of the
            tensors that this process writes, ``sync``, ``async`` and ``overlap`` that training waits for
            ``trainer.save_checkpoint``, for the last one with what the next optimizer step waits, and ``async_all``
            until an asynchronous save is published. ``bytes``: of those tensors. ``on_disk``, ``tensors_on_disk``:
            bytes of the checkpoint. ``parameters``: of the model.
        """
        keep_freed_memory()  # as `fit` does
        found: dict[str, Any] = {}
        saves = _Rounds(lambda trainer: self._save_rounds(trainer, rounds, found))
        self._fit(saves, bf16=bf16, steps=_steps(rounds))
        found["parameters"] = self._config.num_params
        return found

    def load(self, rounds: int) -> Seconds:
        """Time resuming from what :meth:`save` has left in as many rounds, and ``torch.load`` of the same bytes."""
        keep_freed_memory()
        seconds: Seconds = {"plain": [], "resume": []}
        for index in range(-1, rounds):
            for way in turn_order(["plain", "resume"], max(index, 0)):
                if way == "plain":
                    dist.barrier()
                    start = time.perf_counter()
                    torch.load(self._plain_path(), weights_only=True)
                    dist.barrier()
                    spent = time.perf_counter() - start
                else:
                    spent = self._fit(ckpt_path=str(self._trained), steps=_steps(rounds)).seconds
                if index >= 0:
                    seconds[way].append(spent)
                gc.collect()
        return seconds

    def memory(self) -> dict[str, Any]:
        """Peak growth of this process' own memory (RssAnon) in bytes, of each kind of save and of a load.

        Returns:
            ``sync``, ``async``, ``load``. ``shard``: bytes that this process writes. ``bucket``: bytes of one.
        """
        found: dict[str, Any] = {}

        def look(trainer: Trainer) -> Iterator[None]:
            strategy: Any = trainer.strategy
            found["shard"] = sum(value.nbytes for value in _own_tensors(strategy).values())
            found["bucket"] = int(strategy.bucket_megabytes * 2**20)
            for way in ("sync", "async"):
                strategy.async_save = way == "async"
                with _peak_growth() as growth:
                    trainer.save_checkpoint(self._trained)
                    strategy.finish_saves()
                found[way] = growth["peak"]
            yield

        self._fit(_Rounds(look))
        found["load"] = self._fit(ckpt_path=str(self._trained), watched=True).growth
        return found

    def _save_rounds(self, trainer: Trainer, rounds: int, found: dict[str, Any]) -> Iterator[None]:
        """One save after each training step, as they come in training: the optimizer has just written everything."""
        strategy: Any = trainer.strategy
        tensors = {name: value.clone() for name, value in _own_tensors(strategy).items()}  # not their whole bucket
        seconds: Seconds = {"plain": [], "sync": [], "async": [], "async_all": [], "overlap": []}
        for index in range(-1, rounds):
            for way in turn_order(list(WAYS), max(index, 0)):
                if way == "plain":
                    for name, value in _own_tensors(strategy).items():
                        tensors[name].copy_(value)
                    self._plain_path().unlink(missing_ok=True)
                elif trainer.is_global_zero:
                    shutil.rmtree(self._trained, ignore_errors=True)
                strategy.async_save = way if way == "overlap" else way == "async"
                strategy.waited = 0.0
                dist.barrier()
                start = time.perf_counter()
                if way == "plain":
                    with self._plain_path().open("wb") as file:
                        torch.save(tensors, file)
                        file.flush()
                        os.fsync(file.fileno())
                    dist.barrier()
                else:
                    trainer.save_checkpoint(self._trained)
                spent = {way: time.perf_counter() - start}
                if way == "async":
                    strategy.finish_saves()
                    dist.barrier()
                    spent["async_all"] = time.perf_counter() - start
                yield  # a training step
                if way == "overlap":
                    spent["overlap"] += strategy.waited
                    strategy.finish_saves()
                if index >= 0:
                    for name, value in spent.items():
                        seconds[name].append(value)
        files = {path.name: path.stat().st_size for path in self._trained.iterdir()}
        found |= {
            "seconds": seconds,
            "bytes": sum(value.nbytes for value in tensors.values()),
            "on_disk": sum(files.values()),
            "tensors_on_disk": sum(size for name, size in files.items() if name.endswith(".distcp")),
        }

    def _plain_path(self) -> Path:
        return self._folder / f"plain-{os.environ['RANK']}.pt"

    def _fit(
        self,
        *callbacks: Callback,
        ckpt_path: str | None = None,
        bf16: bool = False,
        watched: bool = False,
        steps: int = STEPS,
    ) -> _Timed:
        strategy = _Timed(expert_parallel_size=self._processes, async_save=True)
        strategy.watched = watched
        trainer = silent_trainer(strategy, self._processes, steps, str(self._folder), *callbacks, bf16=bf16)
        data = random_data(str(self._folder), steps, ROWS, 32, self._processes)
        trainer.fit(OLMoE(self._config, schedule_steps=100), data, ckpt_path=ckpt_path)
        return strategy


class _Rounds(Callback):
    """After the steps of the beginning, takes one more step of what it is given after each training step."""

    def __init__(self, action: Callable[[Trainer], Iterator[None]]) -> None:
        self._action = action
        self._rest: Iterator[None] | None = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == STEPS:
            self._rest = self._action(trainer)
        if self._rest is not None:
            next(self._rest, None)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._rest is not None:
            next(self._rest, None)  # what it does after the last step


class _Timed(MoEStrategy):
    """How long a resumed run takes from opening a checkpoint until weights and optimizer state are there."""

    seconds = 0.0
    growth = 0
    waited = 0.0
    """How long something waited for copies."""
    watched = False
    """Whether the memory is looked at, which takes time: freed memory is given back first, and then sampled."""

    @override
    def finish_copy(self) -> None:
        start = time.perf_counter()
        super().finish_copy()
        self.waited += time.perf_counter() - start

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._watch = contextlib.ExitStack()
        self._growth = self._watch.enter_context(_peak_growth()) if self.watched else {"peak": 0}
        dist.barrier()
        self._start = time.perf_counter()
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        dist.barrier()
        self.seconds = time.perf_counter() - self._start
        self._watch.close()
        self.growth = self._growth["peak"]


def _steps(rounds: int) -> int:
    """Training steps of a run that saves in so many rounds and an untimed one, after each step in another way."""
    return STEPS + len(WAYS) * (rounds + 1)


def _own_tensors(strategy: Any) -> dict[str, torch.Tensor]:
    """What this process writes."""
    state = strategy.training_state()
    parts = state.model_to_write() + state.optimizer_to_write()[0]
    return {f"{part.name}:{part.start}": part.values.detach() for part in parts}


@contextlib.contextmanager
def _peak_growth() -> Iterator[dict[str, int]]:
    """Samples RssAnon every 2 ms; what was freed before is given back first, or it would hide what is taken."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    before = _own_memory()
    found, done = {"peak": 0}, threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            found["peak"] = max(found["peak"], _own_memory() - before)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _own_memory() -> int:
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
    except OSError:
        return 0
