"""What the Lightning Trainer adds to a step: ``Trainer.fit`` against a bare loop, in one process.

Both train the same module from the same weights on the same batches with the same optimizer, schedule and clipping.
The Trainer also does what the loop does not: it reads the batches through ``TokenDataModule``, logs to TensorBoard,
computes perplexity, and runs ``ThroughputMonitor``; all of that counts as overhead.
"""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _ours import bare_loss, prepare
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from olmoe_lightning import ModelConfig, OLMoE, TokenDataModule
from olmoe_lightning.callbacks import ThroughputMonitor
from olmoe_lightning.kernels import keep_freed_memory
from olmoe_lightning.plugins import BF16Precision

CLIP_NORM = 1.0
LOG_EVERY_N_STEPS = 10
_DOCUMENT_TOKENS = 500


class StepClock(Callback):
    """The time at the end of every optimizer step."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.marks.append(time.perf_counter())


def silent_trainer(strategy: Any, processes: int, steps: int, folder: str, *callbacks: Callback, bf16: bool) -> Trainer:
    """A Trainer that prints and writes nothing of its own."""
    return Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategy,
        plugins=[BF16Precision()] if bf16 else None,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=folder,
    )


def random_data(folder: str, steps: int, batch_size: int, seq_len: int, processes: int = 1) -> TokenDataModule:
    """Documents of random tokens, enough for ``steps`` steps of ``processes`` x ``batch_size`` rows."""
    path = Path(folder) / f"random-{steps}.npy"
    if not path.exists():
        tokens = np.random.default_rng(0).integers(
            0, 256, (steps + 1) * processes * batch_size * seq_len, dtype=np.uint16
        )
        tokens[_DOCUMENT_TOKENS::_DOCUMENT_TOKENS] = 256  # end of document
        np.save(path, tokens)
    return TokenDataModule(train=str(path), tokenizer="byte", seq_len=seq_len, batch_size=batch_size, cache_dir=folder)


class TrainerSide:
    """The three ways to train: ``bare``, ``trainer`` and ``trainer_bar`` (with the progress bar).

    Args:
        config: fields of :class:`ModelConfig`; the vocabulary must hold bytes and two special tokens.
        seq_len: S.
        tokens: T of a step.
        compile_blocks: the module's own option.
    """

    def __init__(self, config: dict[str, Any], seq_len: int, tokens: int, compile_blocks: bool) -> None:
        keep_freed_memory()  # as `fit` does, also where the bare loop is measured first
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        self._config = ModelConfig.from_dict(config)
        self._seq_len, self._batch_size = seq_len, tokens // seq_len
        self._compile_blocks = compile_blocks
        self._folder = tempfile.TemporaryDirectory()
        self.last_weights: dict[str, torch.Tensor] = {}
        """Of the network, at the end of the last :meth:`measure`."""
        self._terminal = open(os.devnull, "w")  # noqa: SIM115  # lives as long as the process

    def measure(self, way: str, count: int, warmup: int) -> list[float]:
        """Train a fresh module for ``warmup + count`` steps in one of the ways.

        Returns:
            Seconds from the end of a step to the end of the next, for the last ``count`` steps.
        """
        marks = self._bare(warmup + count) if way == "bare" else self._fit(warmup + count, way == "trainer_bar")
        gaps = [after - before for before, after in itertools.pairwise(marks)]
        return gaps[-count:]

    def _module(self, steps: int) -> OLMoE:
        return OLMoE(self._config, compile_blocks=self._compile_blocks, schedule_steps=steps)

    def _data(self, steps: int) -> TokenDataModule:
        return random_data(self._folder.name, steps, self._batch_size, self._seq_len)

    def _bare(self, steps: int) -> list[float]:
        data = self._data(steps)
        data.prepare_data()
        data.setup("fit")
        batches = list(data.train_dataloader())[:steps]
        module = self._module(steps)
        model = module.built()
        optimizer, scheduler = prepare(module)
        marks = []
        for batch in batches:
            optimizer.zero_grad()
            bare_loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            scheduler.step()
            marks.append(time.perf_counter())
        self.last_weights = model.state_dict()
        return marks

    def _fit(self, steps: int, bar: bool) -> list[float]:
        clock = StepClock()
        callbacks: list[Callback] = [ThroughputMonitor(every_n_steps=LOG_EVERY_N_STEPS), clock]
        if bar:
            # Away from a terminal the bar would draw nothing and cost nothing.
            console = {"force_terminal": True, "width": 160, "file": self._terminal}
            callbacks.append(RichProgressBar(console_kwargs=console))
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            gradient_clip_val=CLIP_NORM,
            log_every_n_steps=LOG_EVERY_N_STEPS,
            logger=TensorBoardLogger(self._folder.name),
            enable_progress_bar=bar,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=callbacks,
            default_root_dir=self._folder.name,
        )
        module = self._module(steps)
        trainer.fit(module, self._data(steps))
        self.last_weights = module.built().state_dict()
        return clock.marks
