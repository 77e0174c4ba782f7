"""A sharded checkpoint as one process sees it: what it says of itself, and its tensors read and written in parts.

Such a directory is that of :mod:`olmoe_lightning.checkpoint.sharded` with :data:`META` beside the tensors, the
dictionary of a Lightning checkpoint with an entry :data:`KEY`. Tensors of the model are ``state_dict.NAME`` there, with
NAME as in the ``state_dict`` of the ``LightningModule``, flattened.
"""

from __future__ import annotations

import bisect
import importlib.metadata
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from olmoe_lightning.checkpoint.chunks import ChunkWriter
from olmoe_lightning.checkpoint.foreign.safetensors_dir import TensorInfo, shortened
from olmoe_lightning.checkpoint.publish import make_durable
from olmoe_lightning.checkpoint.sharded import (
    INDEX,
    CorruptCheckpoint,
    Fragment,
    FragmentReader,
    FragmentWriter,
    SafeReader,
    differences,
    load,
    write_item,
)

KEY = "moe_checkpoint"
"""Entry of a checkpoint's dictionary that belongs to the strategy."""
FORMAT = 1
META = "meta.pt"
MODEL = "state_dict."
"""What the names of the model's tensors begin with."""


def is_sharded(path: Path) -> bool:
    """Whether a path is a sharded checkpoint, or what is left of one."""
    return (path / META).is_file() or (path / INDEX).is_file()


def read_meta(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """What a sharded checkpoint holds besides tensors; :data:`KEY` in it says where those are.

    Args:
        path: the directory.
        weights_only: ``False`` lets objects of the user's own classes in, and with them any code; trusted files only.

    Raises:
        CorruptCheckpoint: it is no sharded checkpoint of ours, damaged, or of a newer format.
    """
    if not (path / META).is_file() or not (path / INDEX).is_file():
        raise CorruptCheckpoint(
            f"{path} is no sharded checkpoint: it needs {META} and {INDEX}; weights in Hugging Face's or our own "
            "format are loaded with OLMoE(pretrained=...)"
        )
    try:
        meta: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only is not False)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CorruptCheckpoint(
            f"{path / META} is damaged, or holds objects that are not loaded without trust ({reason})"
        ) from error
    if not isinstance(meta, dict) or not isinstance(meta.get(KEY), dict):
        raise CorruptCheckpoint(f"{path / META} has no entry {KEY!r}: it was not written by MoEStrategy")
    found = meta[KEY].get("format")
    if not isinstance(found, int) or not 1 <= found <= FORMAT:
        raise CorruptCheckpoint(
            f"{path} has checkpoint format {found!r}, this version reads up to {FORMAT}; update olmoe-lightning"
        )
    meta[KEY]["directory"] = str(path)
    return meta


def new_meta(
    hyper_parameters: Mapping[str, Any], shapes: Mapping[str, Iterable[int]], more: Mapping[str, Any]
) -> dict[str, Any]:
    """The dictionary of a checkpoint that has weights and no training state.

    Args:
        hyper_parameters: of the ``LightningModule``.
        shapes: of its tensors, by name.
        more: further entries, for hooks.
    """
    empty: dict[str, Any] = {
        "aliases": {},
        "other": {},
        "scalars": {},
        "random": [],
        "param_groups": [],
        "group_of": {},
    }
    own = {"format": FORMAT, "topology": {"pipeline": 1, "expert_replica": 1, "expert": 1}, "skipped_steps": 0}
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": importlib.metadata.version("lightning"),
        "state_dict": {},
        "hyper_parameters": dict(hyper_parameters),
        **more,
        KEY: own
        | empty
        | {
            "shapes": {name: list(shape) for name, shape in shapes.items()},
            "tensors": sorted(MODEL + name for name in shapes),
        },
    }


# -------------------------------------------------------------------------------------------------- reading


def load_sharded(module: nn.Module, meta: Mapping[str, Any], strict: bool = True) -> None:
    """Load the tensors of a checkpoint into a module that has all its experts and layers, in place.

    Each stored chunk is read once; beyond the module's own memory there is one of them at a time.

    Args:
        module: on any device, in any type.
        meta: from :func:`read_meta`.
        strict: whether the module and the checkpoint must have the same tensors. Shapes must always agree.

    Raises:
        CorruptCheckpoint: they do not, or the checkpoint is damaged.
    """
    directory = Path(meta[KEY]["directory"])
    shapes = _shapes(directory, meta)
    _index(SafeReader(directory), directory, shapes)
    wanted: dict[int, tuple[str, Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            wanted.setdefault(id(value), (name, value))  # tied tensors have several names and one place
    tensors = dict(wanted.values())
    if found := differences({name: list(value.shape) for name, value in tensors.items()}, shapes, strict):
        raise CorruptCheckpoint(f"{directory} does not fit the model: {shortened(found)}")
    with torch.no_grad():
        load(
            directory,
            [
                Fragment(MODEL + name, value.numel(), 0, value.detach().view(-1))
                for name, value in tensors.items()
                if name in shapes
            ],
        )
    if other := meta[KEY].get("other"):
        module.load_state_dict(other, strict=False)


class ShardedStore:
    """The model's tensors of a sharded checkpoint, part by part: a ``TensorStore`` for conversions.

    The index is read once. torch's reader loads a stored chunk (what one process wrote of one tensor) whatever part of
    it is asked for. The last one is therefore kept, so that reading a tensor from its beginning to its end loads each
    chunk once: memory is two chunks at most, the kept one while it is being filled from the loaded one.

    Args:
        meta: from :func:`read_meta`.
        prefix: which tensors; it is taken off their names.

    Raises:
        CorruptCheckpoint: files are missing or cut off, or the index and the dictionary disagree.
    """

    def __init__(self, meta: Mapping[str, Any], prefix: str = "model.") -> None:
        self._directory = Path(meta[KEY]["directory"])
        self._prefix = MODEL + prefix
        shapes = _shapes(self._directory, meta)
        self._reader = SafeReader(self._directory)
        self._metadata = _index(self._reader, self._directory, shapes)
        self._reader.set_up_storage_reader(self._metadata, True)
        self._chunks = {
            name: sorted((int(chunk.offsets[0]), int(chunk.sizes[0])) for chunk in entry.chunks)
            for name, entry in _tensors(self._metadata)
        }
        self._kept: tuple[str, int, Tensor] | None = None
        self.tensors = {
            name.removeprefix(prefix): TensorInfo.of(
                torch.empty(shape, dtype=self._entry(MODEL + name).properties.dtype, device="meta")
            )
            for name, shape in shapes.items()
            if name.startswith(prefix)
        }

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
        values = self._range(self._prefix + name, first * row, (first + count) * row)
        values = values.view(*(1,) * axis, *((count, *shape[axis + 1 :]) if bounds else ()))
        inner = [slice(rows.start, rows.stop) for rows in bounds[axis + 1 :]]
        return values[tuple([slice(None)] * (axis + 1) + inner)] if bounds else values

    def _range(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flattened tensor."""
        chunks = self._chunks[name]
        begin, length = chunks[max(0, bisect.bisect_right(chunks, (start, math.inf)) - 1)] if stop > start else (0, 0)
        if start < stop <= begin + length:
            return self._chunk(name, begin, length)[start - begin : stop - begin]
        values = torch.empty(stop - start, dtype=self._entry(name).properties.dtype)
        for begin, length in chunks:
            first, last = max(start, begin), min(stop, begin + length)
            if first < last:
                values[first - start : last - start] = self._chunk(name, begin, length)[first - begin : last - begin]
        return values

    def _chunk(self, name: str, begin: int, length: int) -> Tensor:
        if self._kept is None or self._kept[:2] != (name, begin):
            self._kept = None  # before there is another
            entry = self._entry(name)
            values = torch.empty(length, dtype=entry.properties.dtype)
            planner = FragmentReader([Fragment(name, int(entry.size[0]), begin, values)])
            planner.set_up_planner({}, self._metadata)
            try:
                self._reader.read_data(planner.create_local_plan(), planner).wait()
            except (OSError, RuntimeError, ValueError, EOFError, AssertionError, pickle.UnpicklingError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise CorruptCheckpoint(f"{self._directory}: {name} cannot be read, its file is damaged ({reason})") \
                    from error  # fmt: skip
            self._kept = (name, begin, values)
        return self._kept[2]

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry


def _shapes(directory: Path, meta: Mapping[str, Any]) -> dict[str, list[int]]:
    shapes = meta[KEY].get("shapes")
    if not isinstance(shapes, dict) or not all(
        isinstance(name, str) and isinstance(shape, list | tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
        for name, shape in shapes.items()
    ):
        raise CorruptCheckpoint(f"{directory / META} does not say what shapes the tensors have")
    return {name: list(shape) for name, shape in shapes.items()}


def _tensors(metadata: Metadata) -> Iterator[tuple[str, TensorStorageMetadata]]:
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)  # SafeReader lets nothing else through
        yield name, entry


def _index(reader: SafeReader, directory: Path, shapes: Mapping[str, list[int]]) -> Metadata:
    """The index, once it is found to have every element of the model in a file that is long enough."""
    metadata = reader.read_metadata()
    problems = []
    sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
    for name, shape in shapes.items():
        if not math.prod(shape):
            continue  # nothing of it is stored
        entry = metadata.state_dict_metadata.get(MODEL + name)
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name} is not in {INDEX}")
            continue
        end = 0
        for begin, chunk in sorted((int(chunk.offsets[0]), int(chunk.sizes[0])) for chunk in entry.chunks):
            if begin != end or chunk < 0:
                break
            end += chunk
            info = metadata.storage_data.get(MetadataIndex(MODEL + name, torch.Size([begin])))
            if info is None or sizes.get(str(info.relative_path), -1) < info.offset + info.length:
                where = "no file" if info is None else info.relative_path
                problems.append(f"{name} is in {where}, which is missing or cut off")
        if end != entry.size[0] or end != math.prod(shape):
            problems.append(f"{name} has {end} elements in a row, its shape {shape} {math.prod(shape)}")
    if problems:
        raise CorruptCheckpoint(f"{directory} is damaged or incomplete: {shortened(problems, 5)}")
    return metadata


# -------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class LazyFragment:
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
    directory: Path, fragments: Iterable[LazyFragment], meta: Mapping[str, Any], advance: Callable[[int], None]
) -> None:
    """Write a checkpoint in one process, and wait until it is on the disk. Memory: one fragment.

    Args:
        directory: exists and is empty.
        fragments: in the order in which they are read and written.
        meta: from :func:`new_meta`.
        advance: told the number of bytes of each fragment.
    """
    writer = ChunkWriter(directory, durable=False)

    def read(fragment: LazyFragment) -> Tensor:
        values = torch.empty(fragment.length, dtype=fragment.dtype)
        values.copy_(fragment.read().reshape(-1))
        advance(values.nbytes)
        return values

    try:
        planner = FragmentWriter((fragment for fragment in fragments if fragment.length), read)
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error  # reading failed, or the disk is full
    torch.save(dict(meta), directory / META)
    make_durable(directory)
