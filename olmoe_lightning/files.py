"""Files that appear complete or not at all, and outlast a loss of power."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under ``path`` complete or not at all.

    The bytes go to a hidden name in the same folder, which is renamed on success and removed on failure: a reader never
    sees half a file, and of two writers at once the later one wins with a whole file.

    Args:
        path: the final name; its folder is created.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a directory, are on the disk.

    Raises:
        OSError: they could not be written; ``filename`` says what.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno == errno.EINVAL and path.is_dir():
            return  # some network file systems have no such thing as a directory that is not yet written
        error.filename = error.filename or str(path)  # fsync knows a number only
        raise
    finally:
        os.close(descriptor)
