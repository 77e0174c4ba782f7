"""Memory-mapped token files: a stream of token ids in which an end-of-document id closes every document.

``.npy`` (1-D uint16 or uint32) and raw little-endian ``.u16``, ``.u32``, ``.bin`` (the last with an explicit dtype).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from olmoe_lightning.data.common import DataError, publish
from olmoe_lightning.progress import progress_bar

TokenDtype = Literal["uint16", "uint32"]

RAW_SUFFIXES: dict[str, TokenDtype | None] = {".u16": "uint16", ".u32": "uint32", ".bin": None}
TEXT_SUFFIXES = (".jsonl", ".json", ".txt", ".md", ".py", ".gz", ".zst")
SCAN_BLOCK = 1 << 22  # tokens per block of a scan: small enough for the cache
_HEADER_BYTES = 128  # our .npy header has a fixed size, so that it can be completed after the tokens


class TokenFile:
    """One token file, checked on construction and mapped on first use.

    Only the header and the size are read here. The map is opened lazily in each process and never pickled, so
    DataLoader workers of every start method work.

    Args:
        path: the file.
        dtype: type of a token; needed for ``.bin``, otherwise it must agree with the file or be ``None``.

    Raises:
        DataError: the file is missing, unreadable, empty, truncated, of another type or not a token file.
    """

    def __init__(self, path: str | Path, dtype: TokenDtype | None = None) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise DataError(f"{self.path}: no such token file; check the path (relative to {Path.cwd()})")
        if self.path.is_dir():
            raise DataError(f"{self.path}: is a folder; name its token files, for example {self.path}/*.npy")
        try:
            size = self.path.stat().st_size
            if size == 0:
                raise DataError(f"{self.path}: is empty (0 bytes); write it again, the run that made it did not finish")
            with self.path.open("rb") as file:
                self.dtype, self._offset, self.num_tokens = self._layout(file, size, dtype)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}); check its permissions") from error
        if self.num_tokens == 0:
            raise DataError(f"{self.path}: holds 0 tokens; write it again from text that is not empty")
        self._map: np.ndarray | None = None

    def _layout(self, file: BinaryIO, size: int, dtype: TokenDtype | None) -> tuple[np.dtype, int, int]:
        suffix = self.path.suffix
        if suffix == ".npy":
            return self._npy_layout(file, size, dtype)
        if suffix in RAW_SUFFIXES:
            implied = RAW_SUFFIXES[suffix]
            if implied is None and dtype is None:
                raise DataError(f"{self.path}: the type of a .bin file must be given: set dtype to uint16 or uint32")
            if implied is not None and dtype not in (None, implied):
                raise DataError(f"{self.path}: dtype {dtype} contradicts the suffix {suffix} ({implied}); remove one")
            item = np.dtype(implied or dtype).newbyteorder("<")
            if size % item.itemsize:
                raise DataError(
                    f"{self.path}: truncated at byte {size}: not a multiple of {item.itemsize} bytes per {item.name} "
                    "token; copy the file again or correct dtype"
                )
            return item, 0, size // item.itemsize
        if suffix in TEXT_SUFFIXES:
            raise DataError(
                f"{self.path}: is text, not tokens; run `olmoe-lightning tokenize {self.path} --output FILE.npy`"
            )
        raise DataError(f"{self.path}: unknown suffix {suffix!r}; token files are .npy, .u16, .u32 or .bin")

    def _npy_layout(self, file: BinaryIO, size: int, dtype: TokenDtype | None) -> tuple[np.dtype, int, int]:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, found = read(file)
        except (ValueError, EOFError) as error:
            raise DataError(f"{self.path}: damaged .npy header at byte 0; write or copy the file again") from error
        if found not in (np.dtype("<u2"), np.dtype("<u4")):
            raise DataError(
                f"{self.path}: wrong dtype {found.name if found.isnative else found.str}, need uint16 or uint32; "
                "save it again with np.save(path, tokens.astype(np.uint16))"
            )
        if dtype is not None and np.dtype(dtype) != found:
            raise DataError(f"{self.path}: holds {found.name} but dtype says {dtype}; remove dtype, .npy knows its own")
        if len(shape) != 1:
            raise DataError(f"{self.path}: has shape {shape}, need one dimension; save tokens.reshape(-1)")
        offset, num_tokens = file.tell(), int(shape[0])
        there = (size - offset) // found.itemsize
        if there < num_tokens:
            raise DataError(
                f"{self.path}: truncated at byte {size}: the header promises {num_tokens} tokens, {there} are there; "
                "copy or write the file again"
            )
        return found, offset, num_tokens

    @property
    def tokens(self) -> np.ndarray:
        """The whole stream as a read-only memory map."""
        if self._map is None:
            self._map = np.memmap(self.path, dtype=self.dtype, mode="r", offset=self._offset, shape=(self.num_tokens,))
        return self._map

    def __len__(self) -> int:
        return self.num_tokens

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_map": None}

    def check_ids(self, vocab_size: int) -> None:
        """Read the whole file once and make sure that every token id is below ``vocab_size``.

        Raises:
            DataError: an id is not; names the first one's position.
        """
        if vocab_size > np.iinfo(self.dtype).max:
            return
        for start, block in self._blocks(f"checking {self.path.name}"):
            if int(block.max()) >= vocab_size:
                at = int(np.argmax(block >= vocab_size))
                raise DataError(
                    f"{self.path}: token id {int(block[at])} at position {start + at} does not fit a vocabulary of "
                    f"{vocab_size}; name the tokenizer that made the file, or use a model with a larger vocabulary"
                )

    def positions_of(self, token_id: int) -> np.ndarray:
        """All positions of a token id, int64, ascending; reads the whole file."""
        found = [
            start + np.flatnonzero(block == token_id) for start, block in self._blocks(f"indexing {self.path.name}")
        ]
        return np.concatenate(found).astype(np.int64, copy=False)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits over the length and the first and last 64 KiB: cheap, and tells files apart."""
        tokens, count = self.tokens, (1 << 16) // self.dtype.itemsize
        state = hashlib.sha256(f"{self.dtype.str} {self.num_tokens}".encode())
        for end in (tokens[:count], tokens[-count:]):
            state.update(end.tobytes())
        return state.hexdigest()[:16]

    def _blocks(self, label: str) -> Iterator[tuple[int, np.ndarray]]:
        with progress_bar(label, self.num_tokens * self.dtype.itemsize, "B") as bar:
            for start in range(0, self.num_tokens, SCAN_BLOCK):
                block = self.tokens[start : start + SCAN_BLOCK]
                yield start, block
                bar.update(block.nbytes)


class TokenWriter:
    """Appends tokens to a ``.npy`` file of unknown length. Made by :func:`write_tokens`."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self._file, self.dtype, self.num_tokens = file, dtype, 0

    def write(self, tokens: np.ndarray) -> None:
        """Append a 1-D array of token ids that fit the file's dtype."""
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self.num_tokens += tokens.size


@contextmanager
def write_tokens(path: Path, vocab_size: int) -> Iterator[TokenWriter]:
    """Open ``path`` (.npy) for appending tokens; the file appears complete or not at all.

    Args:
        path: the final name.
        vocab_size: decides the type: uint16 up to 65,536, then uint32.
    """
    dtype = token_dtype(vocab_size)
    with publish(path) as file:
        file.write(bytes(_HEADER_BYTES))
        writer = TokenWriter(file, dtype)
        yield writer
        file.seek(0)
        file.write(_npy_header(dtype, writer.num_tokens))


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest type for the ids below ``vocab_size``: little-endian uint16 or uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _npy_header(dtype: np.dtype, num_tokens: int) -> bytes:
    # NumPy's own header grows with the number of digits; padding it to a fixed size lets us write it last.
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({num_tokens},), }}".encode()
    magic = np.lib.format.magic(1, 0)
    length = _HEADER_BYTES - len(magic) - 2
    return magic + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"
