"""Text files as documents: plain text (one document per file) and JSON lines, also gzipped or zstandard-compressed."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from olmoe_lightning.data.common import DataError

TEXT = (".txt", ".md", ".py")
COMPRESSED = (".gz", ".zst")
BLOCK_BYTES = 1 << 22  # of text per block: some tens of milliseconds of work, and little memory in flight


@dataclass(frozen=True)
class TextBlock:
    """A block of one file that can be worked on by itself.

    Args:
        path: the file, for messages.
        data: whole lines of a JSON-lines file, or a whole text file.
        line: number of the first line, from 1.
        offset: of the first byte within the (decompressed) file.
    """

    path: str
    data: bytes
    line: int
    offset: int

    def documents(self, text_key: str) -> list[str]:
        """The texts in this block; empty ones are left out.

        Args:
            text_key: the key of the text in a JSON line.

        Raises:
            DataError: bytes that are not UTF-8, a line that is not JSON, or one without the text.
        """
        if _kind(self.path) != ".jsonl":
            text = self._decode(self.data, 0).removeprefix("\ufeff")
            return [text] if text else []
        texts, start = [], 0
        for number, line in enumerate(self.data.split(b"\n"), self.line):
            if line.strip():
                texts.append(self._text_of(self._decode(line, start), number, text_key))
            start += len(line) + 1
        return [text for text in texts if text]

    def _decode(self, data: bytes, start: int) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            where = self.offset + start + error.start
            inside = " of the decompressed text" if self.path.endswith(COMPRESSED) else ""
            raise DataError(
                f"{self.path}: byte {where}{inside} (0x{data[error.start]:02x}) is not UTF-8; "
                "convert the file, for example with `iconv -f latin1 -t utf-8`"
            ) from None

    def _text_of(self, line: str, number: int, text_key: str) -> str:
        try:
            record = json.loads(line)
        except ValueError as error:
            detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(f"{self.path}: line {number} is not valid JSON ({detail}); correct or remove it") from None
        if not isinstance(record, dict):
            raise DataError(
                f"{self.path}: line {number} is not a JSON object; write one like {{{text_key!r}: ...}} per line"
            )
        if text_key not in record:
            keys = ", ".join(map(repr, record)) or "none"
            raise DataError(f"{self.path}: line {number} has no key {text_key!r} (its keys: {keys}); set --text-key")
        text = record[text_key]
        if not isinstance(text, str):
            raise DataError(
                f"{self.path}: line {number}: {text_key!r} is {type(text).__name__}, not str; set --text-key"
            )
        return text


def find_text_files(inputs: Sequence[str]) -> list[str]:
    """Files behind names, folders and globs, in the order given; folders and globs are sorted by name.

    Files of other kinds in a folder are left out; named or matched ones are an error.

    Raises:
        DataError: something does not exist, or has an unknown suffix.
    """
    files: list[str] = []
    for name in inputs:
        if Path(name).is_dir():
            found = [str(path) for path in sorted(Path(name).rglob("*")) if path.is_file() and _is_text(path.name)]
            if not found:
                raise DataError(f"{name}: no {', '.join(('.jsonl', *TEXT))} file (or .gz, .zst of one) in this folder")
        elif Path(name).exists():
            found = [name]
        else:
            found = sorted(glob.glob(name, recursive=True))
            if not found:
                raise DataError(f"{name}: no such file (relative to {Path.cwd()}); check the path")
        for file in found:
            if not _is_text(file):
                suffix = "".join(Path(file).suffixes[-2:])
                known = ", ".join((".jsonl", *TEXT))
                raise DataError(f"{file}: unknown suffix {suffix!r}; known are {known}, also with .gz or .zst")
        files += found
    return files


def read_blocks(path: str) -> Iterator[tuple[TextBlock, int]]:
    """A file in blocks of about 4 MiB, in order.

    Yields:
        (block, bytes of the file on disk that were read for it).

    Raises:
        DataError: the file cannot be read or decompressed, or ends early.
    """
    with _open(path) as (file, raw):
        done = 0
        for block in _whole(path, file) if _kind(path) != ".jsonl" else _lines(path, file):
            yield block, raw.tell() - done
            done = raw.tell()


def _whole(path: str, file: BinaryIO) -> Iterator[TextBlock]:
    yield TextBlock(path, file.read(), 1, 0)


def _lines(path: str, file: BinaryIO) -> Iterator[TextBlock]:
    line, offset, rest = 1, 0, b""
    while data := file.read(BLOCK_BYTES):
        data = rest + data
        end = data.rfind(b"\n") + 1
        data, rest = data[:end], data[end:]
        if data:
            yield TextBlock(path, data, line, offset)
            line += data.count(b"\n")
            offset += len(data)
    if rest:
        yield TextBlock(path, rest, line, offset)


@contextmanager
def _open(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    try:
        with open(path, "rb") as raw:
            if path.endswith(".gz"):
                yield gzip.GzipFile(fileobj=raw), raw  # type: ignore[misc]
            elif path.endswith(".zst"):
                yield _ZstdFile(raw), raw  # type: ignore[misc]
            else:
                yield raw, raw
    except EOFError as error:
        raise DataError(f"{path}: ends in the middle of the compressed data; copy or download it again") from error
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: is not good compressed data ({error}); copy or download it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


class _ZstdFile:
    """Reads all frames of a zstandard file; unlike the library's reader it notices when the last one is cut off."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._buffer, self._inside, self._frame = (
            raw,
            bytearray(),
            False,
            zstandard.ZstdDecompressor().decompressobj(),
        )

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._buffer) < size:
            data = self._raw.read(1 << 17)
            if not data:
                if self._inside:
                    raise EOFError
                break
            while data:
                self._buffer += self._frame.decompress(data)
                self._inside, data = not self._frame.eof, self._frame.unused_data
                if self._frame.eof:
                    self._frame = zstandard.ZstdDecompressor().decompressobj()
        end = len(self._buffer) if size < 0 else size
        result = bytes(self._buffer[:end])
        del self._buffer[:end]
        return result


def _kind(path: str) -> str:
    """The suffix without that of a compression."""
    plain = Path(path)
    return (plain.with_suffix("") if plain.suffix in COMPRESSED else plain).suffix


def _is_text(path: str) -> bool:
    return _kind(path) in (".jsonl", *TEXT)
