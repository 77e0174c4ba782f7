"""Errors that tell a user what was wrong with the input: their message is all that is needed, without a traceback.

They are also of Python's own kinds, so that ``except ValueError`` and ``except FileNotFoundError`` go on to work.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """An argument, option, file or combination of them that cannot be used; the message has the numbers and the way."""


class UserTypeError(UserError, TypeError):
    """A value of the wrong type."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that was named is not there."""


class ExistingFileError(UserError, FileExistsError):
    """A file or folder stands where a new one is to be made."""


class DiskSpaceError(UserError, OSError):
    """The disk is too full."""


def shortened(items: Sequence[str], limit: int = 20, separator: str = ", ") -> str:
    """The first items on one line, and how many more there are."""
    rest = f", and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + rest


def reason(error: BaseException) -> str:
    """The first line of what an error says, or its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
