"""One process of a parallel run: trains through ``Trainer.fit`` under the strategy that it is asked for.

T tokens of a global step.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from _overhead import StepClock, random_data, silent_trainer
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE, TokenDataModule
from olmoe_lightning.kernels import keep_freed_memory


class ParallelSide:
    """Fresh modules from the same weights on the same global batches, under one strategy after the other.

    The processes of a pair stay the same for all of them, and so does their process group.

    Args:
        config: fields of :class:`ModelConfig`; the vocabulary must hold bytes and two special tokens.
        seq_len: S.
        tokens: T, shared by the processes.
        processes: of the run.
        comm: how tokens travel with expert parallelism.
    """

    def __init__(self, config: dict[str, Any], seq_len: int, tokens: int, processes: int, comm: str = "auto") -> None:
        keep_freed_memory()  # as `fit` does
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        self._config = ModelConfig.from_dict(config)
        self._seq_len, self._processes, self._comm = seq_len, processes, comm
        self._batch_size = tokens // seq_len // processes
        self._folder = tempfile.TemporaryDirectory()

    def measure(self, way: str, count: int, warmup: int) -> list[float]:
        """Train for ``warmup + count`` steps.

        Returns:
            Seconds from the end of a step to the end of the next, for the last ``count`` steps.
        """
        clock = StepClock()
        trainer, _ = self._fit(way, warmup + count, clock)
        del trainer
        gc.collect()
        return [after - before for before, after in itertools.pairwise(clock.marks)][-count:]

    def memory(self, way: str, bf16: bool) -> dict[str, float]:
        """Train two steps and count the bytes of all tensors that are alive afterwards.

        Returns:
            ``measured``: bytes of tensors that were not there before. ``predicted``: by the formula. ``parts``: what
            the strategy says that they are.
        """
        scales = _Scales()
        self._fit(way, 2, scales, bf16=bf16)
        return scales.found

    def pipeline(self, schedule: str, microbatches: int, steps: int, warmup: int) -> dict[str, list[float]]:
        """Train in a pipeline of all processes, whose batch is that of one process without it.

        Returns:
            ``step``: seconds in which the schedule ran, of the last ``steps`` steps. ``compute``: those of them in
            which this process computed; the rest it waited or sent.
        """
        watch = _StageWatch()
        trainer = self._trainer(
            MoEStrategy(pipeline_parallel_size=self._processes, schedule=schedule, num_microbatches=microbatches),
            warmup + steps,
            watch,
        )
        module = OLMoE(self._config, schedule_steps=100)
        trainer.fit(module, self._data(warmup + steps))
        return {"step": watch.step[-steps:], "compute": watch.compute[-steps:]}

    def _fit(self, way: str, steps: int, callback: Callback, bf16: bool = False) -> tuple[Trainer, OLMoE]:
        trainer = self._trainer(_strategy(way, self._comm), steps, callback, bf16)
        module = OLMoE(self._config, schedule_steps=max(steps, 100))
        trainer.fit(module, self._data(steps))
        return trainer, module

    def _trainer(self, strategy: Any, steps: int, callback: Callback, bf16: bool = False) -> Trainer:
        return silent_trainer(strategy, self._processes, steps, self._folder.name, callback, bf16=bf16)

    def _data(self, steps: int) -> TokenDataModule:
        return random_data(self._folder.name, steps, self._batch_size, self._seq_len, self._processes)


class _Scales(Callback):
    """Weighs when training is over and the fit is not: its end gives memory back, and a bf16 module its masters."""

    def __init__(self) -> None:
        gc.collect()
        self._before = _storages()
        self.found: dict[str, Any] = {}

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()
        strategy = trainer.strategy
        assert isinstance(strategy, MoEStrategy)
        assert strategy.sharded is not None
        self.found = {
            "measured": sum(size for place, size in _storages().items() if place not in self._before),
            "predicted": strategy.sharded.predicted_bytes(),
            "parts": strategy.sharded.persistent_bytes(),
            "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
        }


class _StageWatch(Callback):
    """Times a schedule, and the computations of the stages in it."""

    def __init__(self) -> None:
        self.step: list[float] = []
        self.compute: list[float] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MoEStrategy)
        assert strategy.pipeline is not None
        run = strategy.pipeline.train

        def timed(*args: Any) -> Any:
            with _computing() as spent:
                start = time.perf_counter()
                sums = run(*args)
                self.step.append(time.perf_counter() - start)
                self.compute.append(sum(spent))
            return sums

        strategy.pipeline.train = timed  # type: ignore[method-assign]


@contextlib.contextmanager
def _computing() -> Iterator[list[float]]:
    """Collect the seconds of each computation of a stage; what a stage waits for comes before them."""
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    spent: list[float] = []
    originals = {name: getattr(PipelineStage, name) for name in names}

    def timed(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - start)

        return call

    for name, original in originals.items():
        setattr(PipelineStage, name, timed(original))
    try:
        yield spent
    finally:
        for name, original in originals.items():
            setattr(PipelineStage, name, original)


def _strategy(way: str, comm: str) -> Any:
    """Lightning's own by its name; ours as ``moe`` or ``moe_ep2``."""
    if not way.startswith("moe"):
        return way
    if "_ep" not in way:
        return MoEStrategy()
    return MoEStrategy(expert_parallel_size=int(way.removeprefix("moe_ep")), comm=comm)


def _storages() -> dict[int, int]:
    """Address and bytes of each storage that a live tensor uses."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        try:
            tensors = [thing, thing.grad] if isinstance(thing, torch.Tensor) else []
        except ReferenceError:
            continue
        for tensor in tensors:
            if tensor is not None and tensor.device.type == "cpu" and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr():
                    found[storage.data_ptr()] = storage.nbytes()
    return found
