"""A directory of safetensors files, or one such file: headers read at once, tensors block by block, written likewise.

The safetensors library writes a file from tensors that are all in memory. A file here can be larger than the memory
(and most often is larger than anyone wants to spend on a conversion), so the writer below puts the format down itself:
an 8-byte length, a JSON header, then every tensor's bytes in turn. The library reads and checks the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from olmoe_lightning.errors import MissingFileError, UserError, shortened

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
    """A tensor to be written: its header, and a function that yields its values in row-major order, in blocks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[Tensor]]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsReader:
    """All tensors of a file, or of a directory's ``model*.safetensors``.

    Opening it reads headers only. Tensors are mapped from one file at a time, and the mapping is renewed every 64 MiB,
    so that pages which were read do not count as this process's memory for longer than that.

    Args:
        path: one file, or a directory with ``model.safetensors``, or with several and
            ``model.safetensors.index.json``.

    Raises:
        MissingFileError: there is no such file, or one that the index names is missing.
        UserError: a file is damaged, or the index and the files disagree.
    """

    def __init__(self, path: Path) -> None:
        self.directory = path.parent if path.is_file() else path
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        self._file_of: dict[str, str] = {}
        self._open: tuple[str, Any] | None = None
        self._mapped_bytes = 0
        weight_map = {"": path.name} if path.is_file() else _weight_map(path)
        for file in sorted(set(weight_map.values())):
            handle = self._handle(file)
            self.metadata |= handle.metadata() or {}
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
        part: Tensor = self._handle(self._file_of[name]).get_slice(name)[index or (slice(None),)]
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
    directory: Path, tensors: Sequence[TensorWriter], max_file_bytes: int, advance: Callable[[int], object]
) -> None:
    """Writes tensors into files, with an index if there are several, and checks the files' headers afterwards.

    Memory: one block of one tensor at a time.

    Args:
        directory: exists and has no safetensors.
        tensors: in the order in which they are written; their blocks are asked for in that order, once.
        max_file_bytes: a file takes no further tensor beyond this size; a larger tensor gets a file for itself.
        advance: called with the number of bytes of each block.

    Raises:
        UserError: a tensor's blocks do not add up to its shape.
    """
    files: list[list[TensorWriter]] = []
    size = 0
    for tensor in tensors:
        if not files or size + tensor.num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.num_bytes
    weight_map = {}
    for number, content in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE_NAME
        with (directory / name).open("xb") as file:
            write_safetensors_file(file, content, {}, advance)
        weight_map.update({tensor.name: name for tensor in content})
    if len(files) > 1:
        index = {
            "metadata": {
                "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
                "total_size": sum(tensor.num_bytes for tensor in tensors),
            },
            "weight_map": dict(sorted(weight_map.items())),
        }
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    written = SafetensorsReader(directory)
    expected = {tensor.name: TensorInfo(tensor.shape, tensor.dtype, _CODES[tensor.dtype]) for tensor in tensors}
    if written.tensors != expected:
        wrong = sorted(n for n in expected | written.tensors if expected.get(n) != written.tensors.get(n))
        raise RuntimeError(f"{directory}: headers read back differ from what was written: {shortened(wrong)}")


def write_safetensors_file(
    file: BinaryIO, tensors: Sequence[TensorWriter], metadata: Mapping[str, str], advance: Callable[[int], object]
) -> None:
    """Writes one file; see :func:`write_safetensors`.

    Args:
        file: empty.
        tensors: see there.
        metadata: of the file, beside its format.
        advance: see there.

    Raises:
        UserError: see there.
    """
    # Wider types first, as the library does: then every tensor begins at a multiple of its item size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in tensors:
        written = 0
        for block in tensor.blocks():
            raw = block.to("cpu", tensor.dtype).contiguous().view(-1).view(torch.uint8).numpy()
            written += file.write(raw.data)
            advance(raw.nbytes)
            del block, raw  # a block maps its file: do not hold it while the next one is opened
        if written != tensor.num_bytes:
            raise UserError(
                f"{tensor.name}: {written} bytes were produced, its shape {tensor.shape} has {tensor.num_bytes}"
            )
