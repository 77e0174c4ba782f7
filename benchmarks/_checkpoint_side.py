"""One process of the checkpoint benchmark: saves and loads inside of ``Trainer.fit``, and without any of that."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from _memory import peak_growth
from _overhead import random_data, silent_trainer
from _timing import turn_order
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from typing_extensions import override

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE
from olmoe_lightning.checkpoint import directory
from olmoe_lightning.checkpoint.chunks import ChunkWriter
from olmoe_lightning.checkpoint.directory import SafeReader
from olmoe_lightning.kernels import keep_freed_memory
from olmoe_lightning.model import Transformer

STEPS = 2
"""Before the first save: the moments are there, and no step is the first one."""
ROWS = 16
"""Sequences of a process' step, of 32 tokens: long enough to copy meanwhile, far shorter than real steps."""
WAYS = ("plain", "sync", "async", "overlap")
WRITERS: dict[str, Callable[[Path], FileSystemWriter]] = {
    "sync": ChunkWriter,
    "torch_1_thread": FileSystemWriter,
    "torch_2_threads": partial(FileSystemWriter, thread_count=2),
    "torch_file_per_range": partial(FileSystemWriter, single_file_per_rank=False),
}
"""Ways of a synchronous save: our writer of chunks, and that of ``torch.distributed.checkpoint`` in its place."""
READERS: dict[str, Any] = {"resume": SafeReader.read_data, "torch_resume": FileSystemReader.read_data}
"""Ways to load: our reader of chunks, and torch's."""

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

    def save(self, rounds: int, bf16: bool = False, ways: tuple[str, ...] = WAYS) -> dict[str, Any]:
        """Time saves, one untimed before, in each of some ways: :data:`WAYS` and :data:`WRITERS`.

        Returns:
            ``seconds``: of each round until all processes are done, ``plain`` for ``torch.save`` and ``fsync`` of the
            tensors that this process writes, ``sync``, ``async`` and ``overlap`` that training waits for
            ``trainer.save_checkpoint``, for the last one with what the next optimizer step waits, and ``async_all``
            until an asynchronous save is published. ``bytes``: of those tensors. ``on_disk``, ``tensors_on_disk``:
            bytes of the checkpoint. ``parameters``: of the model.
        """
        keep_freed_memory()  # as `fit` does
        found: dict[str, Any] = {}
        saves = _Rounds(lambda trainer: self._save_rounds(trainer, rounds, found, list(ways)))
        self._fit(saves, bf16=bf16, steps=_steps(rounds, len(ways)))
        found["parameters"] = self._config.num_params
        return found

    def load(self, rounds: int, saved_in_ways: int = len(WAYS), ways: tuple[str, ...] = ("resume",)) -> Seconds:
        """Time resuming from what :meth:`save` has left in as many rounds, and ``torch.load`` of the same bytes."""
        keep_freed_memory()
        seconds: Seconds = {"plain": [], **{way: [] for way in ways}}
        for index in range(-1, rounds):
            for way in turn_order(list(seconds), max(index, 0)):
                if way == "plain":
                    dist.barrier()
                    start = time.perf_counter()
                    torch.load(self._plain_path(), weights_only=True)
                    dist.barrier()
                    spent = time.perf_counter() - start
                else:
                    with patch.object(SafeReader, "read_data", READERS[way]):
                        spent = self._fit(ckpt_path=str(self._trained), steps=_steps(rounds, saved_in_ways)).seconds
                if index >= 0:
                    seconds[way].append(spent)
                gc.collect()
        return seconds

    def memory(
        self, saves: tuple[str, ...] = ("sync", "async"), loads: tuple[str, ...] = ("resume",)
    ) -> dict[str, Any]:
        """Peak growth of this process' own memory (RssAnon) in bytes, of each kind of save and of a load.

        Returns:
            Each of ``saves`` and ``loads``. ``shard``: bytes that this process writes. ``bucket``: bytes of one.
        """
        found: dict[str, Any] = {}

        def look(trainer: Trainer) -> Iterator[None]:
            strategy: Any = trainer.strategy
            found["shard"] = sum(value.nbytes for value in _own_tensors(strategy).values())
            found["bucket"] = int(strategy.bucket_megabytes * 2**20)
            for way in saves:
                strategy.async_save = way == "async"
                if trainer.is_global_zero:
                    shutil.rmtree(self._trained, ignore_errors=True)
                dist.barrier()
                with peak_growth() as growth, _written_by(way):
                    trainer.save_checkpoint(self._trained)
                    strategy.finish_saves()
                found[way] = growth["peak"]
            yield

        self._fit(_Rounds(look))
        for way in loads:
            with patch.object(SafeReader, "read_data", READERS[way]):
                found[way] = self._fit(ckpt_path=str(self._trained), watched=True).growth
        return found

    def build(self, rounds: int) -> Seconds:
        """Seconds of building the network, in each of :data:`BUILDERS`, one untimed before."""
        seconds: Seconds = {way: [] for way in BUILDERS}
        for index in range(-1, rounds):
            for way in turn_order(list(BUILDERS), max(index, 0)):
                spent = self._build(way).seconds
                if index >= 0:
                    seconds[way].append(spent)
        return seconds

    def build_memory(self, way: str) -> dict[str, int]:
        """Bytes that are reserved while the network is built; in a process that has not freed any before."""
        built = self._build(way)
        return {"peak": built.growth, "own": sum(value.nbytes for value in built.parameters())}

    def _build(self, way: str) -> _Built:
        module = BUILDERS[way](self._config, schedule_steps=100)
        self._fit(module=module, steps=1)
        return module

    def _save_rounds(self, trainer: Trainer, rounds: int, found: dict[str, Any], ways: list[str]) -> Iterator[None]:
        """One save after each training step, as they come in training: the optimizer has just written everything."""
        strategy: Any = trainer.strategy
        tensors = {name: value.clone() for name, value in _own_tensors(strategy).items()}  # not their whole bucket
        seconds: Seconds = {way: [] for way in (*ways, "async_all")}
        for index in range(-1, rounds):
            for way in turn_order(ways, max(index, 0)):
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
                    with _written_by(way):
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
        module: OLMoE | None = None,
    ) -> _Timed:
        strategy = _Timed(expert_parallel_size=self._processes, async_save=True)
        strategy.watched = watched
        trainer = silent_trainer(strategy, self._processes, steps, str(self._folder), *callbacks, bf16=bf16)
        data = random_data(str(self._folder), steps, ROWS, 32, self._processes)
        trainer.fit(module or OLMoE(self._config, schedule_steps=100), data, ckpt_path=ckpt_path)
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
        self._growth = self._watch.enter_context(peak_growth()) if self.watched else {"peak": 0}
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


class _Built(OLMoE):
    """Says how long it takes to build the network, and how much memory is reserved meanwhile at most."""

    seconds = 0.0
    growth = 0

    @override
    def configure_model(self) -> None:
        if self.model is None:
            with peak_growth("VmData") as growth:
                start = time.perf_counter()
                self._build()
                self.seconds = time.perf_counter() - start
            self.growth = growth["peak"]

    def _build(self) -> None:
        self.built()


class _BuiltWhole(_Built):
    """The same with Lightning's ``trainer.init_module(empty_init=True)``: all of it on the device at once."""

    @override
    def _build(self) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.tensor_init_context(empty_init=True):
            self.model = Transformer(self.config)
        self.model.init_weights(self.init_seed, strategy.place_experts(self.model))


BUILDERS: dict[str, type[_Built]] = {"ours": _Built, "tensor_init_context": _BuiltWhole}


def _steps(rounds: int, ways: int) -> int:
    """Training steps of a run that saves in so many rounds and an untimed one, after each step in another way."""
    return STEPS + ways * (rounds + 1)


def _written_by(way: str) -> Any:
    """While it lasts, chunks are written by this one of :data:`WRITERS`; background saves by ours."""
    return patch.object(directory, "ChunkWriter", WRITERS.get(way, ChunkWriter))


def _own_tensors(strategy: Any) -> dict[str, torch.Tensor]:
    """What this process writes."""
    state = strategy.training_state()
    parts = state.model_to_write() + state.optimizer_to_write()[0]
    return {f"{part.name}:{part.start}": part.values.detach() for part in parts}
