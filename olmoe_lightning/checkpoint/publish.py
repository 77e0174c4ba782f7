"""A checkpoint appears under its name in one step, or not at all.

A save writes into a hidden directory beside its target; :func:`publish` makes that durable and gives it the target's
name. A process can be killed, or a machine can lose its power, before any line of this file: the name then stands for
the whole old checkpoint or for the whole new one, and :func:`clean` finds what else was left. (Without an atomic
exchange of two names, which most local Linux file systems have, the old one may need :func:`clean` to come back.)

Hidden names are ``.NAME.HOST.PID-START.RANDOM.tmp``, or ``.old`` for what steps aside in the case without exchange.
START is when that process began, in clock ticks since the system's start: containers give the same PID again and again.
NAME is cut off where all of this would be too long for a file system, which is found out before anything is replaced.
In NAME the characters ``_`` and ``~`` have changed places: who looks for ``hpc_ckpt_`` anywhere in the names of a
folder, as Lightning does, and takes all digits behind it for a version, must not find what is half written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from olmoe_lightning.files import sync

_HIDDEN = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d{1,7})-(?P<start>\d{1,19})\.[0-9a-f]{8}\.(?P<kind>tmp|old)"
)
_UNDERSCORES = str.maketrans("_~", "~_")
_NAME_BYTES = 255
_FOREIGN_SECONDS = 24 * 3600
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # renameat2 of Linux; RENAME_SWAP of macOS' renamex_np has the same value
# EPERM is what a container's filter of system calls answers. If it was about permissions, plain renaming fails too.
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def temporary_beside(target: Path) -> Path:
    """Makes an empty hidden directory in the target's folder, and so on its file system; makes that folder if need be.

    Args:
        target: the name to publish under; it need not exist.

    Returns:
        The directory. Globs that do not begin with a dot do not find it.

    Raises:
        OSError: it cannot be made.
    """
    new = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync(folder.parent)
    temporary = _hidden(target, "tmp")
    temporary.mkdir()
    return temporary


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Gives a hidden name beside the target to write a file to; at the end it gets the target's name in one step.

    Args:
        target: a file, a directory or a link is replaced, as :func:`publish` does it.

    Raises:
        OSError: it cannot be written; the target is what it was, and nothing else is left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _hidden(target, "tmp")
    try:
        yield temporary
        publish(temporary, target)
    except BaseException:
        with suppress(OSError):
            _delete(temporary)
        raise


def make_durable(path: Path) -> None:
    """Waits until a file, or all files and directories below a directory, are on disk. Links are not followed.

    On a network file system this is about what this machine has written: there, each machine calls it for its part.

    Raises:
        OSError: something could not be written or read; ``filename`` says what.
    """
    for folder, _, files in os.walk(path, topdown=False, onerror=_raise):
        for file in (Path(folder, name) for name in files):
            if stat.S_ISREG(file.lstat().st_mode):
                sync(file)
        sync(Path(folder))
    if not path.is_dir():
        sync(path)


def publish(temporary: Path, target: Path) -> None:
    """Makes ``temporary`` durable, then gives it the target's name in one step; what had that name is removed.

    If the target exists, the two names are exchanged, so that there is a checkpoint under that name at every moment.
    Where the system or the file system cannot do that, the old one steps aside first, under a hidden name.
    A target that is a symbolic link is replaced itself; what it points at stays.

    Args:
        temporary: from :func:`temporary_beside`, filled.
        target: the name to publish under, in the same folder.

    Raises:
        OSError: the target is what it was, and ``temporary`` is still there. Only if the error comes from the folder's
            own synchronisation has the new one its name already, which a loss of power could undo.

    Warns:
        RuntimeWarning: the new one is published, the old one could not be removed; a later :func:`clean` tries again.
    """
    make_durable(temporary)
    if not os.path.lexists(target):
        os.rename(temporary, target)
    elif not _exchange(temporary, target):
        _exchange_in_three_steps(temporary, target)
    sync(target.parent)  # before the old one goes: else its name could come back without its files
    try:
        _delete(temporary)  # now the name of the old one, if there was one
    except OSError as error:
        warnings.warn(f"{target} is saved; what it replaced could not be removed: {error}", RuntimeWarning, 2)


def remove(path: Path) -> None:
    """Removes a checkpoint (directory, file or link) that must not be found half deleted; a missing one is no error.

    Removes a temporary directory as well, of a save that was given up.

    Raises:
        OSError: it cannot be removed. It has its name still, or a hidden one that a later :func:`clean` finds.
    """
    hidden = path if _HIDDEN.fullmatch(path.name) else _hidden(path, "tmp")
    try:
        os.rename(path, hidden)
    except FileNotFoundError:
        return
    sync(path.parent)
    _delete(hidden)


def clean(directory: Path) -> list[Path]:
    """Removes what killed saves have left in a folder, and gives an old checkpoint its name back if nothing has it.

    Left over is what a process of this host made that has ended. A process of another host cannot be looked up: what
    it made must not have changed for a day. Only an old checkpoint whose name is free does not wait: if its process
    should be alive after all, that one's save fails and loses nothing. All other files are left alone.

    Args:
        directory: the folder of the checkpoints; a missing one has nothing to clean.

    Returns:
        What was removed.

    Raises:
        OSError: the folder cannot be read, or something in it can be neither removed nor renamed.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [(directory / name, match) for name in names if (match := _HIDDEN.fullmatch(name))]
    removed, restored = [], []
    # Last renamed first: should several old ones wait for one name, the newest gets it.
    for path, match in sorted(found, key=lambda item: _changed(item[0]), reverse=True):
        own_host = match["host"] == _host()
        if own_host and _is_running(int(match["pid"]), int(match["start"])):
            continue
        target = directory / match["name"].translate(_UNDERSCORES)
        if match["kind"] == "old" and not os.path.lexists(target):
            with suppress(FileNotFoundError):  # another process cleans, too
                os.rename(path, target)
            restored.append(target)
        elif own_host or time.time() - _last_written(path) > _FOREIGN_SECONDS:
            remains = path.with_suffix(".tmp")  # from here on never to be given its name back, should this be killed
            if match["kind"] == "old":
                with suppress(FileNotFoundError):
                    os.rename(path, remains)
                sync(directory)
            _delete(remains)
            removed.append(path)
    if restored:
        sync(directory)
    return removed


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names atomically. False: the system or the file system has no such thing, nothing has changed."""
    libc = ctypes.CDLL(None, use_errno=True)
    a, b = os.fsencode(first), os.fsencode(second)
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(a, b, _RENAME_EXCHANGE)
        else:
            failed = libc.renameat2(_AT_FDCWD, a, _AT_FDCWD, b, _RENAME_EXCHANGE)
    except AttributeError:  # the C library is older than the call
        return False
    code = ctypes.get_errno()
    if failed and code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code), str(first), None, str(second))
    return not failed


def _exchange_in_three_steps(temporary: Path, target: Path) -> None:
    """Exchanges two names by way of a third. A process killed after the first step leaves a lone old checkpoint."""
    old = _hidden(target, "old")
    try:
        os.rename(target, old)
        os.rename(temporary, target)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(target):
            os.rename(old, target)
        raise
    sync(target.parent)  # a lone old one is good for something until the new one has its name for sure
    os.rename(old, temporary)


def _delete(path: Path) -> None:
    with suppress(FileNotFoundError):  # another process deletes it, too
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _raise(error: OSError) -> None:
    if not isinstance(error, NotADirectoryError):  # the path itself may be a file
        raise error


def _hidden(target: Path, kind: str) -> Path:
    pid = os.getpid()
    rest = f".{_host()}.{pid}-{max(_start(pid), 0)}.{secrets.token_hex(4)}.{kind}"
    name = os.fsencode(target.name.translate(_UNDERSCORES))
    most = _NAME_BYTES - 1 - len(rest)
    if len(name) > most and kind == "old":  # it could not be given back
        raise OSError(errno.ENAMETOOLONG, f"a file system that cannot exchange names needs one of {most} bytes", target)
    return target.parent / f".{os.fsdecode(name[:most])}{rest}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:64] or "unnamed"


def _start(pid: int) -> int:
    """When a process began, in clock ticks since the system's start. 0: not known. -1: ended, but not waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def _is_running(pid: int, start: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # someone else's process
    now = _start(pid)
    return now == start or (now >= 0 and 0 in (now, start))


def _changed(path: Path) -> int:
    """When a path was renamed or written, in ns; 0 if it has just gone."""
    try:
        return path.lstat().st_ctime_ns
    except FileNotFoundError:
        return 0


def _last_written(path: Path) -> float:
    """The newest time of modification below a path, in seconds; now, if it changes while it is looked at."""
    try:
        times = [path.lstat().st_mtime]
        for folder, _, files in os.walk(path):
            times += [os.lstat(os.path.join(folder, name)).st_mtime for name in (".", *files)]
        return max(times)
    except FileNotFoundError:
        return time.time()
