"""How these callbacks reach the loggers: once per value, at the step at which Lightning logs the loss."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger


def logged_step(trainer: Trainer) -> int:
    """The step number Lightning gives to metrics of the optimizer step that just ended (it counts from 0)."""
    return max(trainer.global_step - 1, 0)


def log_scalars(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Send scalars to every logger, without passing through the result collection of the module.

    ``LightningModule.log`` keeps a value and repeats it at later logging steps, and is forbidden in ``on_train_end``.
    The loggers themselves write on rank 0 only.
    """
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)


def tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    """The TensorBoard loggers among all loggers: only they take pictures and text."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
