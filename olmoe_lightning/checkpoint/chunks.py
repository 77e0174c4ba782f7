"""A chunk, a stored range of a flattened tensor: the archive of ``torch.save``, written and read without a copy.

``torch.save`` takes a copy of a view before it writes it, and ``torch.load`` makes a tensor of everything that is
stored, also where a range of it is wanted that has its place already. What is written here any ``torch.load`` reads,
and what ``torch.save`` wrote is read here.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from olmoe_lightning._torch import rebuild_tensor, storage_info

_SAVE = "save"
"""Key of an index: name of the directory into which all processes wrote."""
_BLOCK = 4 << 20
"""Bytes that are written at once; the disk begins with them while the next are prepared."""
_HEADER = struct.Struct("<4s5H3I2H")
"""Of a file in an archive."""
_HEAD = 512
"""Bytes in which the values of an archive begin."""
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


class ChunkWriter(FileSystemWriter):
    """Writes the ranges of a process one after the other to one file; each is asked for when it is its turn.

    Torch's own keeps all that it has written until the end of a file: what conversions stream would be in memory whole.

    Args:
        path: the directory.
        durable: whether to return only when the file is on the disk.
    """

    def __init__(self, path: Path, durable: bool = True) -> None:
        super().__init__(path, sync_files=durable)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with (Path(self.path) / name).open("w+b", buffering=0) as file:
                file.write(head_of(Path(self.path).name, name))
                for item in plan.items:
                    offset = file.tell()
                    write_chunk(file, cast(Tensor, planner.resolve_data(item)))
                    length = file.tell() - offset
                    results.append(WriteResult(item.index, length, storage_info(name, offset, length)))
                if self.sync_files:
                    os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.planner_data = {_SAVE: Path(self.path).name}
        super().finish(metadata, results)


def save_of(metadata: Metadata) -> str:
    """What the heads of a checkpoint's files begin with; empty if an index does not say, as those of others."""
    planner = metadata.planner_data
    return str(planner.get(_SAVE, "")) if isinstance(planner, dict) else ""


def head_of(save: str, name: str) -> bytes:
    """With what a file of chunks begins: which save it is of, and which of its files.

    Args:
        save: name of the directory into which all processes wrote.
        name: of the file.
    """
    return f"{save}/{name}\n".encode(errors="surrogateescape")


def write_chunk(file: io.FileIO, values: Tensor) -> None:
    """Write values where a file stands, as ``torch.save`` does.

    Args:
        file: without a buffer; it can seek.
        values: flat and contiguous.
    """
    values = values.detach().cpu()
    if values.dtype not in _STORAGES:
        buffer = io.BytesIO()
        torch.save(values.clone(), buffer)  # what is not wanted of the storage would be written too
        _Section(file, file.tell()).write(buffer.getbuffer())
        return
    raw: Any = values.view(torch.uint8).numpy()
    data = memoryview(raw)
    section = _Section(file, file.tell())
    with zipfile.ZipFile(section, "w") as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), _pickled(values))
        archive.writestr(zipfile.ZipInfo("archive/byteorder"), sys.byteorder)
        record = zipfile.ZipInfo("archive/data/0")
        record.file_size = len(data)
        with archive.open(record, "w") as stream:
            for start in range(0, len(data), _BLOCK):
                stream.write(data[start : start + _BLOCK])
        archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
    file.seek(section.end)


class _Stored:
    """Stands for a tensor, and for its storage, while the archive's description of it is made."""

    def __init__(self, values: Tensor, storage: _Stored | None = None) -> None:
        self.values, self.storage = values, storage

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        size = (self.values.numel(),)
        return rebuild_tensor, (self.storage, 0, size, (1,), False, OrderedDict())


class _Pickler(pickle.Pickler):
    @override
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Stored) and obj.storage is None:
            return "storage", _STORAGES[obj.values.dtype], "0", "cpu", obj.values.numel()
        return None


def _pickled(values: Tensor) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Stored(values, _Stored(values)))
    return buffer.getvalue()


def read_chunk(
    file: io.FileIO, offset: int, length: int, elements: int, dtype: torch.dtype, first: int, target: Tensor
) -> bool:
    """Read a range of a chunk straight into its place.

    Args:
        file: open, without a buffer.
        offset: where the archive begins.
        length: its bytes.
        elements: of the chunk.
        dtype: of them.
        first: of those that are wanted.
        target: flat; as many elements are read as it has.

    Returns:
        Whether it was done. What lies otherwise than ``torch.save`` puts it is for ``torch.load``.

    Raises:
        EOFError: the file is cut off.
    """
    if target.device.type != "cpu" or not target.is_contiguous():
        return False
    start = _start_of_data(file, offset, length, elements * dtype.itemsize)
    if start is None:
        return False
    values = target if target.dtype == dtype else torch.empty(target.shape, dtype=dtype)
    raw: Any = values.view(torch.uint8).numpy()
    view = memoryview(raw)
    file.seek(start + first * dtype.itemsize)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise EOFError(f"{file.name} is cut off")
        view = view[count:]
    if values is not target:
        target.copy_(values)
    return True


def _start_of_data(file: io.FileIO, offset: int, length: int, size: int) -> int | None:
    """Where the values of an archive begin; ``None`` when they are not there as they are, or not so many bytes."""
    start = _start_by_headers(file, offset, length, size)
    return _start_by_directory(file, offset, length, size) if start is None else start


def _start_by_headers(file: io.FileIO, offset: int, length: int, size: int) -> int | None:
    """The same for what :func:`write_chunk` wrote, of which the first bytes say enough; ``None``: look further."""
    file.seek(offset)
    head = file.read(_HEAD) or b""
    at = 0
    while at + _HEADER.size <= len(head):
        magic, _, flags, method, _, _, _, stored, unpacked, name_length, extra_length = _HEADER.unpack_from(head, at)
        begin = at + _HEADER.size + name_length + extra_length
        name = head[at + _HEADER.size :][:name_length]
        if magic != b"PK\3\4" or flags or method != zipfile.ZIP_STORED or stored != unpacked:
            return None
        if name.endswith(b"/data/0"):
            return offset + begin if stored == size and begin + size <= length else None
        if name.endswith(b"/byteorder") and head[begin:][:stored] != sys.byteorder.encode():
            return None
        at = begin + stored
    return None


def _start_by_directory(file: io.FileIO, offset: int, length: int, size: int) -> int | None:
    try:
        with zipfile.ZipFile(io.BufferedReader(_Section(file, offset, length), 1024)) as archive:
            (record,) = (each for each in archive.infolist() if each.filename.endswith("/data/0"))
            order = next((e for e in archive.infolist() if e.filename.endswith("/byteorder")), None)
            if order is not None and archive.read(order) != sys.byteorder.encode():
                return None
    except (zipfile.BadZipFile, ValueError):
        return None
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != size:
        return None
    file.seek(offset + record.header_offset)
    header = file.read(30)  # the local one, whose name and extra field may have other lengths than the directory's
    lengths: tuple[int, int] = struct.unpack("<HH", header[26:30])
    return offset + record.header_offset + 30 + sum(lengths)


class _Section(io.RawIOBase):
    """A part of a file as a file.

    Args:
        file: without a buffer.
        start: where the part begins.
        length: its bytes, to read from it; zero to write it.
    """

    def __init__(self, file: io.FileIO, start: int, length: int = 0) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    @property
    def end(self) -> int:
        """The byte of the file behind the part."""
        return self._start + self._length

    @override
    def readable(self) -> bool:
        return True

    @override
    def writable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    @override
    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count: int = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count

    @override
    def write(self, data: Any) -> int:
        view = memoryview(data)
        begin, size = self._start + self._at, len(view)
        self._file.seek(begin)
        while len(view):
            view = view[self._file.write(view) :]
        if size >= _BLOCK:
            _begin_writing(self._file, begin, size)
        self._at += size
        self._length = max(self._length, self._at)
        return size


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    try:
        return ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None  # only Linux has it


def _begin_writing(file: io.FileIO, start: int, size: int) -> None:
    """Let the disk begin with what was written, so that ``fsync`` has less to wait for; a hint, and no more."""
    call = _sync_file_range()
    if call is not None:
        only_start = 2  # SYNC_FILE_RANGE_WRITE
        call(file.fileno(), ctypes.c_int64(start), ctypes.c_int64(size), only_start)
