"""A sharded checkpoint as conversions see it: its tensors read and written by one process, a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from olmoe_lightning.checkpoint.chunks import ChunkWriter
from olmoe_lightning.checkpoint.directory import (
    RangeWriter,
    read_range,
    write_item,
)
from olmoe_lightning.checkpoint.foreign.safetensors_dir import TensorInfo
from olmoe_lightning.checkpoint.meta import KEY, META, MODEL, read_contents


class ShardedStore:
    """The model's tensors of a sharded checkpoint: a ``TensorStore`` for conversions.

    Args:
        meta: from :func:`~olmoe_lightning.checkpoint.meta.read_meta`.
        prefix: which tensors; it is taken off their names.

    Raises:
        CorruptCheckpoint: files are missing or cut off, or the index and the dictionary disagree.
    """

    def __init__(self, meta: Mapping[str, Any], prefix: str = "model.") -> None:
        self._directory = Path(meta[KEY]["directory"])
        self._prefix = MODEL + prefix
        shapes, metadata = read_contents(meta)
        self.tensors = {}
        for name, shape in shapes.items():
            if name.startswith(prefix):
                entry = metadata.state_dict_metadata[MODEL + name]
                assert isinstance(entry, TensorStorageMetadata)  # SafeReader lets nothing else through
                values = torch.empty(shape, dtype=entry.properties.dtype, device="meta")
                self.tensors[name.removeprefix(prefix)] = TensorInfo.of(values)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A part of a tensor, on the CPU: one slice per leading dimension (none: all of it).

        Raises:
            CorruptCheckpoint: the values cannot be read.
        """
        shape = self.tensors[name].shape
        bounds = [range(*part.indices(size)) for part, size in zip(index, shape, strict=False)]
        bounds += [range(size) for size in shape[len(bounds) :]]
        # Up to the first dimension with several rows, a part is one range of the flattened tensor.
        axis = next((i for i, rows in enumerate(bounds) if len(rows) != 1), max(len(bounds) - 1, 0))
        row = math.prod(shape[axis + 1 :])
        first = 0
        for rows, size in zip(bounds[: axis + 1], shape, strict=False):
            first = first * size + rows.start
        count = len(bounds[axis]) if bounds else 1
        values = read_range(self._directory, self._prefix + name, first * row, (first + count) * row)
        values = values.view(*(1,) * axis, *((count, *shape[axis + 1 :]) if bounds else ()))
        inner = [slice(rows.start, rows.stop) for rows in bounds[axis + 1 :]]
        return values[tuple([slice(None)] * (axis + 1) + inner)] if bounds else values


@dataclass(frozen=True)
class LazyRange:
    """A range of a flattened tensor whose values are asked for when it is their turn to be written."""

    name: str
    size: int
    """Elements of the whole tensor."""
    start: int
    length: int
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """The values, of any type and shape, in row-major order."""

    @property
    def item(self) -> WriteItem:
        """The range, for torch's writer."""
        return write_item(self.name, self.size, self.start, self.length, self.dtype)


def write_sharded(
    directory: Path, ranges: Iterable[LazyRange], meta: Mapping[str, Any], advance: Callable[[int], object]
) -> None:
    """Write a checkpoint in one process. Memory: one range.

    Args:
        directory: exists and is empty.
        ranges: in the order in which they are read and written.
        meta: from :func:`~olmoe_lightning.checkpoint.meta.new_meta`.
        advance: called with the number of bytes of each range.
    """
    writer = ChunkWriter(directory, durable=False)

    def read(wanted: LazyRange) -> Tensor:
        values = torch.empty(wanted.length, dtype=wanted.dtype)
        values.copy_(wanted.read().reshape(-1))
        advance(values.nbytes)
        return values

    try:
        planner = RangeWriter((wanted for wanted in ranges if wanted.length), read)
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error  # reading failed, or the disk is full
    torch.save(dict(meta), directory / META)
