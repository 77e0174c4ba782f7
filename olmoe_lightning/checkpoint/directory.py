"""Tensors in a directory, written and read by many processes: each its own range of each flattened tensor.

The format is that of ``torch.distributed.checkpoint``: a tensor lies there under its global name as one dimension, in
as many chunks as there were writers. A chunk is a stored range. Which process wrote which does not matter for
reading: ranges are asked for.

Nothing that is read can execute code: chunks are loaded with ``weights_only=True``, and the index, a pickle, by an
unpickler that knows the classes of an index and nothing else.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.futures import Future
from typing_extensions import override

from olmoe_lightning.checkpoint.chunks import ChunkWriter, head_of, read_chunk, save_of
from olmoe_lightning.errors import UserError, shortened

# A single process is what was asked for. Not around the call: filters are the whole process', and threads save too.
warnings.filterwarnings("ignore", ".*assuming the intent is to (save|load) in a single process.*")

INDEX = ".metadata"
"""The file of the directory that says which range is where; it is written last."""

Part = TypeVar("Part", bound="Writable")


@dataclass(frozen=True)
class Range:
    """A range of a flattened global tensor, and the values that this process has of it or wants to have."""

    name: str
    size: int
    """Elements of the global tensor."""
    start: int
    values: Tensor
    """Flat and contiguous. What is read is cast to its dtype."""

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or not self.values.is_contiguous():
            raise UserError(f"{self.name}: a range is flat and contiguous, not {list(self.values.shape)}")
        if not 0 <= self.start <= self.start + self.values.numel() <= self.size:
            raise UserError(
                f"{self.name}: elements {self.start} to {self.start + self.values.numel()} are not within {self.size}"
            )

    @property
    def key(self) -> tuple[str, int]:
        """Name and first element: no process has two ranges of one key."""
        return self.name, self.start

    @property
    def item(self) -> WriteItem:
        """The range, for torch's writer."""
        return write_item(self.name, self.size, self.start, self.values.numel(), self.values.dtype)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The range, for the index."""
        return ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=self.values.shape)


class CorruptCheckpoint(UserError):
    """A directory that is no checkpoint, not a complete one, or one of another model."""


class WriteError(OSError):
    """A process could not write its part; the same on all of them."""


def save(directory: Path, ranges: Iterable[Range], group: dist.ProcessGroup | None = None) -> None:
    """Write the ranges of all processes; collective. What two processes have in common is written by the first.

    Args:
        directory: on a file system that all processes share; it need not exist.
        ranges: of this process.
        group: the processes, one of which must be rank 0; ``None``: only this one.

    Raises:
        WriteError: a process could not write, or a tensor has no complete set of ranges, or some that overlap.
    """
    writer = ChunkWriter(directory)  # each machine makes durable what it wrote
    try:
        wanted = [each for each in ranges if each.values.numel()]
        planner = RangeWriter(wanted, lambda each: each.values.detach())
        save_checkpoint({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise WriteError(_reasons(error)) from error


def load(directory: Path, ranges: Iterable[Range], group: dist.ProcessGroup | None = None) -> None:
    """Fill the ranges of this process; collective. Names and sizes must fit, see :func:`index_of`.

    Each process plans and reads for itself, and in the end they agree on whether all could.

    Raises:
        CorruptCheckpoint: a file is missing, cut off, or not what the index says; on all processes.
    """
    problem, cause = "", None
    try:
        load_checkpoint({}, storage_reader=SafeReader(directory), planner=RangeReader(ranges), no_dist=True)
    except CheckpointException as error:
        ((found, _),) = error.failures.values()
        problem, cause = f"rank {dist.get_rank(group) if group else 0}: {type(found).__name__}: {found}", error
    problems = [problem]
    if group is not None:
        problems = [""] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    if problems := [each for each in problems if each]:
        raise CorruptCheckpoint(
            f"{directory} cannot be read, it is damaged or incomplete ({shortened(problems, 3, '; ')})"
        ) from cause


def _reasons(error: CheckpointException) -> str:
    """What went wrong on the first processes on which something did."""
    found = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
    return shortened(found, 3, "; ")


def index_of(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Every tensor of a directory: its number of elements, dtype and chunks.

    Raises:
        CorruptCheckpoint: there is no index, or it is none of ours.
    """
    entries: dict[str, Any] = SafeReader(directory).read_metadata().state_dict_metadata
    return entries


def read_range(directory: Path, name: str, start: int, stop: int) -> Tensor:
    """Some elements of one flattened tensor, in its own dtype, in one process."""
    reader = SafeReader(directory)
    found: Any = reader.read_metadata().state_dict_metadata[name]
    values = torch.empty(stop - start, dtype=found.properties.dtype)
    if stop > start:
        load(directory, [Range(name, math.prod(found.size), start, values)])
    return values


class SafeReader(FileSystemReader):
    """Reads a directory without trusting it, and a chunk straight into the place where its values are wanted."""

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        others: list[ReadItem] = []
        for name, items in by_file.items():
            with (Path(self.path) / name).open("rb", buffering=0) as file:
                self._check_head(file, name)
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    target = planner.resolve_tensor(item).detach()
                    if self._read(file, item, target):
                        planner.commit_tensor(item, target)
                    else:
                        others.append(item)
        if others:
            return super().read_data(LoadPlan(others), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_head(self, file: io.FileIO, name: str) -> None:
        """That it is the file of which the index speaks, and not one of another checkpoint or process."""
        if self._save:
            expected = head_of(self._save, name)
            found = file.read(len(expected))
            if found != expected:
                what = "is empty" if not found else "is that of another checkpoint or process"
                raise CorruptCheckpoint(f"{name} {what}")

    def _read(self, file: io.FileIO, item: ReadItem, target: Tensor) -> bool:
        info, index = self.storage_data[item.storage_index], item.storage_index
        entry = self._entries[index.fqn]
        lengths = [chunk.sizes[0] for chunk in entry.chunks if chunk.offsets == index.offset]
        return len(lengths) == 1 and read_chunk(
            file, info.offset, info.length, lengths[0], entry.properties.dtype, item.storage_offsets[0], target
        )

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._entries: dict[str, Any] = metadata.state_dict_metadata
        self._save = save_of(metadata)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; others must not change it, since it is read once for several readers."""
        path = Path(self.path) / INDEX
        try:
            status = path.stat()
        except OSError as error:
            raise CorruptCheckpoint(f"{self.path} is no sharded checkpoint: it has no {INDEX}") from error
        return _read_index(path, (status.st_ino, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=1)
def _read_index(path: Path, version: tuple[int, ...]) -> Metadata:
    """Read an index without trusting it.

    Args:
        path: of the file.
        version: what makes it another file than one of this name that was read before.
    """
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise CorruptCheckpoint(f"{path} is damaged, or no index of a checkpoint ({error})") from error
    entries = getattr(metadata, "state_dict_metadata", None)
    if not isinstance(metadata, Metadata) or not isinstance(entries, dict):
        raise CorruptCheckpoint(f"{path} is no index of a checkpoint but a {type(metadata).__name__}")
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata) or len(entry.size) != 1:
            raise CorruptCheckpoint(f"{path}: {name!r} is not a flattened tensor")
    inside = path.parent.resolve()
    for name in {info.relative_path for info in (metadata.storage_data or {}).values()}:
        if (inside / name).resolve().parent != inside:
            raise CorruptCheckpoint(f"{path} points at a file outside of the checkpoint: {name!r}")
    metadata.storage_meta = StorageMeta()
    return metadata


_DTYPES = {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
_INDEX_CLASSES = {
    "torch": {"Size", "contiguous_format", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "WindowsPath"},
}


class _Unpickler(pickle.Unpickler):
    """Knows what an index is made of; everything else is refused before it is looked up."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return super().find_class(module, name)


class Writable(Protocol):
    """A range that can be written."""

    @property
    def item(self) -> WriteItem:
        """The range, for torch's writer."""


class RangeWriter(SavePlanner, Generic[Part]):
    """Writes ranges; the state dictionary of torch's interface is not used.

    Args:
        ranges: of this process, each of at least one element.
        values: of a range, flat, when it is its turn.
    """

    def __init__(self, ranges: Iterable[Part], values: Callable[[Part], Tensor]) -> None:
        self.ranges = {each.item.index: each for each in ranges}
        self.values = values

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing is needed."""

    @override
    def create_local_plan(self) -> SavePlan:
        return SavePlan([each.item for each in self.ranges.values()])

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        taken: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in taken]
            taken.update(item.index for item in items)
            plans.append(SavePlan(items))
        plans, metadata = create_default_global_save_plan(plans)
        for name, entry in metadata.state_dict_metadata.items():
            _check_cover(name, entry)
        return plans, metadata

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self.values(self.ranges[MetadataIndex(write_item.index.fqn, write_item.index.offset)])


class RangeReader(LoadPlanner):
    """Reads into ranges."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges = {each.key: each for each in ranges}

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.entries = metadata.state_dict_metadata

    @override
    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for wanted in self.ranges.values():
            if not wanted.values.numel():
                continue
            entry: Any = self.entries.get(wanted.name)
            if entry is None or entry.size[0] != wanted.size:
                there = "not there" if entry is None else f"{entry.size[0]} elements there"
                raise UserError(f"{wanted.name} has {wanted.size} elements here and is {there}")
            found = create_read_items_for_chunk_list(wanted.name, entry, [wanted.chunk])
            if sum(item.lengths[0] for item in found) != wanted.values.numel():
                raise UserError(f"{wanted.name} is not complete")
            items += found
        return LoadPlan(items)

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UserError(f"{read_item.dest_index.fqn} is no tensor")

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        values = self.ranges[index.fqn, index.offset[0]].values
        return values[read_item.dest_offsets[0] : read_item.dest_offsets[0] + read_item.lengths[0]]

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was copied in place."""


def write_item(name: str, size: int, start: int, length: int, dtype: torch.dtype) -> WriteItem:
    """A range of a flattened tensor, for torch's writer.

    Args:
        name: global name.
        size: elements of the global tensor.
        start: first element of the range.
        length: its elements.
        dtype: as stored.
    """
    return WriteItem(
        index=MetadataIndex(name, torch.Size([start])),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([length])),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size([size]),
        ),
    )


def _check_cover(name: str, entry: Any) -> None:
    """Each element is written once."""
    end = 0
    for start, length in sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in entry.chunks):
        if start != end:
            raise UserError(f"{name}: elements {min(start, end)} to {max(start, end)} have "
                             f"{'no writer' if start > end else 'two writers'}")  # fmt: skip
        end = start + length
    if end != entry.size[0]:
        raise UserError(f"{name}: elements {end} to {entry.size[0]} have no writer")


def differences(wanted: Mapping[str, list[int]], there: Mapping[str, list[int]], strict: bool = True) -> list[str]:
    """What keeps a checkpoint from being loaded: a line for each tensor that is missing, unexpected or misshapen.

    Args:
        wanted: global shapes of the whole model, by name.
        there: those of the checkpoint.
        strict: whether missing and unexpected ones matter.
    """
    found = []
    if strict:
        found += [f"missing: {name}" for name in wanted if name not in there]
        found += [f"unexpected: {name}" for name in there if name not in wanted]
    found += [
        f"{name} is {there[name]} there, {shape} here"
        for name, shape in wanted.items()
        if name in there and there[name] != shape
    ]
    return found
