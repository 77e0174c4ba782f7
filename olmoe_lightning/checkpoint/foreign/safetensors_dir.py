"""A directory of safetensors shards: its headers read at once, its tensors piece by piece, and written the same way.

The safetensors library writes a shard from tensors that are all in memory. A shard here can be larger than the memory
(and most often is larger than anyone wants to spend on a conversion), so the writer below puts the format down itself:
an 8-byte length, a JSON header, then every tensor's bytes in turn. The library reads and checks the result.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from olmoe_lightning.errors import MissingFileError, UserError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_REMAP_BYTES = 64 * 2**20
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor. ``dtype`` is None when it is not one of the floating types in :data:`DTYPES`."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    type_name: str

    @property
    def itemsize(self) -> int:
        """Bytes of one value, of a type in :data:`DTYPES`."""
        return DTYPES[self.type_name].itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorInfo:
        """What the header of this tensor would say."""
        code = _CODES.get(tensor.dtype)
        return cls(tuple(tensor.shape), tensor.dtype if code else None, code or str(tensor.dtype))


@dataclass(frozen=True)
class TensorWriter:
    """A tensor to be written: its header, and a function that yields its values in row-major order, in pieces."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsReader:
    """All tensors of a directory's ``model*.safetensors``.

    Opening it reads headers only. Tensors are mapped from the file, one shard at a time, and the mapping is renewed
    every 64 MiB, so that pages which were read do not count as this process's memory for longer than that.

    Args:
        directory: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.

    Raises:
        FileNotFoundError: there is no such file, or a shard that the index names is missing.
        ValueError: a shard is damaged, or the index and the shards disagree.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, TensorInfo] = {}
        self._file_of: dict[str, str] = {}
        self._open: tuple[str, Any] | None = None
        self._mapped_bytes = 0
        weight_map = _weight_map(self.directory)
        for file in sorted(set(weight_map.values())):
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118  (not a dictionary)
                view = handle.get_slice(name)
                code = view.get_dtype()
                self.tensors[name] = TensorInfo(tuple(view.get_shape()), DTYPES.get(code), code)
                if name in self._file_of:
                    raise UserError(f"{self.directory}: {name} is in {self._file_of[name]} and in {file}")
                self._file_of[name] = file
        wrong = [f"{n} (index: {f})" for n, f in weight_map.items() if n and self._file_of.get(n) != f]
        if wrong:
            raise UserError(f"{self.directory}: tensors not in the shard that the index names: {shortened(wrong)}")

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A part of a tensor. It shares memory with the mapped file: use it, then let it go."""
        part = self._handle(self._file_of[name]).get_slice(name)[index or (slice(None),)]
        self._mapped_bytes += part.nbytes
        return part

    def _handle(self, file: str) -> Any:
        if self._open is None or self._open[0] != file or self._mapped_bytes > _REMAP_BYTES:
            self._open = None  # unmap before mapping again
            self._mapped_bytes = 0
            path = self.directory / file
            if not path.is_file():
                raise MissingFileError(f"{path} is missing: the checkpoint is incomplete, fetch it again")
            try:
                self._open = (file, safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise UserError(
                    f"{path} ({path.stat().st_size} bytes) cannot be read: {error}; fetch it again"
                ) from error
        return self._open[1]


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor to file name. A directory with one file has no index: then an empty name stands for all its tensors."""
    if (directory / INDEX_NAME).is_file():
        try:
            weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{directory / INDEX_NAME} is not an index of safetensors shards: {error!r}") from error
    if (directory / SINGLE_NAME).is_file():
        return {"": SINGLE_NAME}
    if pickles := sorted(directory.glob("pytorch_model*.bin")):
        raise MissingFileError(
            f"{directory} has {pickles[0].name} and no safetensors. Pickled weights are not read; rewrite them with "
            f"transformers: OlmoeForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW_DIRECTORY)"
        )
    raise MissingFileError(f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}")


def write_safetensors(
    directory: Path, tensors: Sequence[TensorWriter], max_shard_bytes: int, advance: Callable[[int], None]
) -> None:
    """Writes tensors into shards, with an index if there are several, and checks the files' headers afterwards.

    Memory: one piece of one tensor at a time. Files are synchronised to disk.

    Args:
        directory: exists and has no safetensors.
        tensors: in the order in which they are written; their pieces are asked for in that order, once.
        max_shard_bytes: a shard takes no further tensor beyond this size; a larger tensor gets a shard for itself.
        advance: told the number of bytes after each piece.

    Raises:
        ValueError: a tensor's pieces do not add up to its shape.
    """
    shards: list[list[TensorWriter]] = []
    size = 0
    for tensor in tensors:
        if not shards or size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE_NAME
        # Wider types first, as the library does: then every tensor begins at a multiple of its item size.
        shard.sort(key=lambda tensor: -tensor.dtype.itemsize)
        _write_shard(directory / file, shard, advance)
        weight_map.update({tensor.name: file for tensor in shard})
    if len(shards) > 1:
        index = {
            "metadata": {
                "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
                "total_size": sum(tensor.num_bytes for tensor in tensors),
            },
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_text(directory / INDEX_NAME, json.dumps(index, indent=2) + "\n")
    written = SafetensorsReader(directory)
    expected = {tensor.name: TensorInfo(tensor.shape, tensor.dtype, _CODES[tensor.dtype]) for tensor in tensors}
    if written.tensors != expected:
        wrong = sorted(n for n in expected | written.tensors if expected.get(n) != written.tensors.get(n))
        raise RuntimeError(f"{directory}: headers read back differ from what was written: {shortened(wrong)}")


def _write_shard(path: Path, tensors: list[TensorWriter], advance: Callable[[int], None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                raw = piece.to("cpu", tensor.dtype).contiguous().view(-1).view(torch.uint8).numpy()
                written += file.write(raw.data)
                advance(raw.nbytes)
                del piece, raw  # a piece maps its shard: do not hold it while the next shard is opened
            if written != tensor.num_bytes:
                raise UserError(
                    f"{tensor.name}: {written} bytes were produced, its shape {tensor.shape} has {tensor.num_bytes}"
                )
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Writes a small file and synchronises it to disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shortened(items: Sequence[str], limit: int = 20) -> str:
    """The first items on one line, and how many more there are."""
    rest = f", and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest
