"""What every file of the data room shares: its error, and its way to write a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from olmoe_lightning.errors import UserError
from olmoe_lightning.files import write_atomically


class DataError(UserError):
    """Data that cannot be trained on. The message is one line: the file, the position, and what to do."""


@contextmanager
def publish(path: Path) -> Iterator[BinaryIO]:
    """:func:`write_atomically` where the user has chosen the folder.

    Raises:
        DataError: the folder cannot be written to.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(write_atomically(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
        yield file
