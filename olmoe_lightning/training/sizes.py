"""Sizes that cannot work together, refused where they are known: before a process starts, else when data is set up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from olmoe_lightning._lightning import distributes_samplers
from olmoe_lightning.errors import UserError


@runtime_checkable
class EqualBatches(Protocol):
    """A data module whose training batches all have the same number of rows."""

    @property
    def rows_per_batch(self) -> int:
        """Rows of each batch of a process."""


def refuse_batches(trainer: Trainer, data: Iterable[Any], parts: int, replicas: int = 1) -> None:
    """Stop if a training batch has a number of rows that cannot be cut into microbatches.

    Args:
        trainer: how many batches it asks for.
        data: data loaders and data modules; what does not say how many rows it has is checked at its first batch.
        parts: microbatches of a batch.
        replicas: processes among which Lightning is going to share out the samples; 1 if it has done so.

    Raises:
        UserError: the numbers.
    """
    for each in data:
        if isinstance(each, EqualBatches):
            _refuse(each.rows_per_batch, parts, f"batch_size of {type(each).__name__}")
        elif isinstance(each, DataLoader):
            _refuse_loader(trainer, each, parts, replicas)


def _refuse(rows: int, parts: int, what: str, remedy: str = "") -> None:
    if rows % parts:
        lower, upper = rows // parts * parts, -(-rows // parts) * parts
        nearest = f"{lower} or {upper}" if lower else str(upper)
        raise UserError(
            f"{what} ({rows}) cannot be cut into num_microbatches ({parts}) equal parts; "
            + (remedy or f"take {nearest}, or another num_microbatches")
        )


def _refuse_loader(trainer: Trainer, loader: DataLoader[Any], parts: int, replicas: int) -> None:
    batches: Any = loader.batch_sampler
    size = getattr(batches, "batch_size", None)  # a user's own sampler of batches may have none
    if not isinstance(size, int) or isinstance(size, bool):
        return
    _refuse(size, parts, "the data loader's batch_size")
    try:
        samples = len(batches.sampler)
    except (TypeError, AttributeError, NotImplementedError):
        return
    shared = isinstance(batches.sampler, RandomSampler | SequentialSampler) and distributes_samplers(trainer)
    if replicas > 1 and shared:
        samples = -(-samples // replicas)
    full, last = divmod(samples, size)
    if last and not getattr(batches, "drop_last", True) and _most_batches(trainer, full + 1) > full:
        _refuse(
            last,
            parts,
            f"the last batch of {samples} samples in batches of {size}",
            f"set drop_last=True, or take a dataset of which each process gets a multiple of {parts} samples",
        )


def _most_batches(trainer: Trainer, length: int) -> float:
    """Of an epoch, those that training asks for."""
    limit = trainer.limit_train_batches
    asked = float(limit) if isinstance(limit, int) else float(int(length * limit))
    steps = trainer.max_steps
    return min(asked, steps * trainer.accumulate_grad_batches) if steps >= 0 else asked
