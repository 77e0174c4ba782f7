"""What every file of the data room shares: its error, its progress bar and its way to publish a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm  # type: ignore[import-untyped]

from olmoe_lightning.errors import UserError


class DataError(UserError):
    """Data that cannot be trained on. The message is one line: the file, the position, and what to do."""


def progress_bar(label: str, total: int, unit: str) -> tqdm:
    """A progress bar that appears only when the work takes longer than two seconds.

    Args:
        label: what is being done, in two or three words.
        total: amount of work in ``unit``; 0 when it is not known.
        unit: name of one piece of work; ``"B"`` is scaled to kB, MB, GB.
    """
    scale = unit == "B"
    return tqdm(desc=label, total=total or None, unit=unit, unit_scale=scale, delay=2, leave=False, dynamic_ncols=True)


@contextlib.contextmanager
def publish(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under ``path`` complete or not at all.

    The bytes go to a temporary name in the same folder, which is renamed on success and removed on failure: a reader
    never sees half a file, and of two writers at once the later one wins with a whole file.

    Args:
        path: the final name; its folder is created.

    Raises:
        DataError: the folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a published one follows the user's umask as an ordinary open() would
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
