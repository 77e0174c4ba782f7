"""Errors that tell a user what was wrong with the input: their message is all that is needed, without a traceback.

They are also of Python's own kinds, so that ``except ValueError`` and ``except FileNotFoundError`` go on to work.
"""

from __future__ import annotations


class UserError(ValueError):
    """An argument, option, file or combination of them that cannot be used; the message has the numbers and the way."""


class UserTypeError(UserError, TypeError):
    """A value of the wrong type."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that was named is not there."""


class ExistingFileError(UserError, FileExistsError):
    """A file or folder stands where a new one is to be made."""


class DiskSpaceError(UserError, OSError):
    """There is not enough room on the disk."""
