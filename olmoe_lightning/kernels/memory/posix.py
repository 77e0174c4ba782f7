"""Symmetric memory of processes of one host: files in memory without a name, which each process maps.

A file made by ``memfd_create`` has no name in any folder; the others open it through ``/proc/PID/fd``. So nothing can
be left behind: when the last process ends, however it ends, the system takes the memory back. It is no part of
``/dev/shm`` either, which containers often keep small.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from olmoe_lightning._torch import group_timeout
from olmoe_lightning.kernels.memory.mapped_region import MappedRegion
from olmoe_lightning.kernels.memory.symmetric import MAX_NUMBERS, PeerError, Region, SymmetricMemory
from olmoe_lightning.kernels.native import integer, library, unavailable_reason

_BLOCK = 4096
"""Bytes of a process' meeting point: see ``cpu/peers.cpp``. Its last eight bytes tell it from any other file."""
_SLICE_SECONDS = 0.1
"""After so long a wait looks whether the others still live."""

ELSEWHERE = (
    "it needs memory that all processes can map, which only those of one host have; take 'all_to_all', which runs over "
    "any network, or 'deepep' on GPUs of several hosts"
)
"""What to do where there is no such memory."""


def posix_memory_missing() -> str | None:
    """Why the processes of this host cannot share memory this way; ``None`` when they can."""
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return "sharing memory between processes needs Linux (memfd_create and /proc)"
    if not dist.is_available():
        return "this build of torch has no torch.distributed"
    return None


class PosixMemory(SymmetricMemory):
    """Memory that the processes of a group on one host share; made by all of them together.

    Args:
        group: a process group that can carry objects; it is used here only, and where the meeting in shared memory
            cannot be had (no C++ compiler).
        timeout: seconds that a process waits for another; ``None`` for the group's.

    Raises:
        ValueError: on all processes, when they cannot map each other's memory; the message says what to take instead.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = _timeout_of(group) if timeout is None else timeout
        self._sequence = 0
        self._watched: list[int | None] = []
        block = os.memfd_create("olmoe-lightning-peers", os.MFD_CLOEXEC)
        try:
            os.ftruncate(block, _BLOCK)
            own = mmap.mmap(block, _BLOCK)
            token = os.urandom(8)
            own[-8:] = token
            introductions: list[Any] = [None] * self.size
            mine = (socket.gethostname(), os.getpid(), block, token, unavailable_reason() is None)
            dist.all_gather_object(introductions, mine, group=group)
            maps, problem = self._meet(introductions)
            problems: list[Any] = [None] * self.size
            dist.all_gather_object(problems, problem, group=group)
        finally:
            os.close(block)
        if any(problems):
            hosts = sorted({host for host, *_ in introductions})
            raise ValueError(
                f"{next(filter(None, problems))}; the processes are on hosts {', '.join(hosts)}: {ELSEWHERE}"
            )
        self._pids = [pid for _, pid, *_ in introductions]
        self._watched = [_watch(pid) for pid in self._pids]
        self._meets = all(native for *_, native in introductions)
        self._maps = maps
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps]
        self._blocks = (ctypes.c_void_p * self.size)(*addresses)

    def _meet(self, introductions: Sequence[Any]) -> tuple[list[mmap.mmap], str | None]:
        maps: list[mmap.mmap] = []
        for other, (host, pid, fd, token, _) in enumerate(introductions):
            try:
                each = _map(pid, fd, _BLOCK)
            except OSError as error:
                return (
                    maps,
                    f"rank {self.rank} cannot open the memory of rank {other} (process {pid} on {host}): {error}",
                )
            if each[-8:] != token:
                return maps, f"rank {self.rank} finds another process than rank {other} under the number {pid}"
            maps.append(each)
        return maps, None

    def allocate(self, nbytes: int) -> Region:
        """A file of each process, mapped by all."""
        nbytes = max(nbytes, mmap.PAGESIZE)
        file = os.memfd_create("olmoe-lightning-region", os.MFD_CLOEXEC)
        maps, failed = [], ""
        try:
            os.ftruncate(file, nbytes)
            files = self.exchange([file])
            try:
                maps = [_map(pid, fd, nbytes) for pid, (fd,) in zip(self._pids, files, strict=True)]
            except OSError as error:
                failed = f": {error}"
            good = self.exchange([not failed])
        finally:
            os.close(file)
        if wrong := [rank for rank, (fine,) in enumerate(good) if not fine]:
            raise MemoryError(f"ranks {wrong} of {self.size} could not map {nbytes} bytes of each of them{failed}")
        return MappedRegion(maps, nbytes)

    def exchange(self, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Over words in shared memory, or over the group where there are no compiled kernels."""
        count = len(numbers)
        if count > MAX_NUMBERS:
            raise ValueError(f"an exchange carries at most {MAX_NUMBERS} numbers, got {count}")
        if not self._meets:
            return self._exchange_by_group(numbers)
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        mine, all_numbers = (ctypes.c_int64 * count)(*numbers), (ctypes.c_int64 * (count * self.size))()
        sequence = ctypes.c_int32(self._sequence)
        library().peers_post(self._blocks, integer(self.rank), sequence, mine, integer(count))
        read = library().peers_read
        read.restype = ctypes.c_int64
        started = time.monotonic()
        while True:
            seconds = ctypes.c_double(min(_SLICE_SECONDS, self.timeout))
            missing = read(self._blocks, integer(self.size), sequence, integer(count), seconds, all_numbers)
            if missing < 0:
                break
            # One that posted before it ended has come; only then is it looked at again.
            self._check(missing, started, lambda: read(self._blocks, integer(self.size), sequence, integer(count),
                                                       ctypes.c_double(0), all_numbers))  # fmt: skip
        return [tuple(all_numbers[rank * count : (rank + 1) * count]) for rank in range(self.size)]

    def _check(self, missing: int, started: float, look_again: Callable[[], int]) -> None:
        waited = time.monotonic() - started
        watched = self._watched[missing]
        ended = watched is not None and bool(select.select([watched], [], [], 0)[0])
        if (ended or waited > self.timeout) and look_again() == missing:
            what = "has ended" if ended else f"did not come within {waited:.0f} s"
            raise PeerError(f"rank {missing} of {self.size} (process {self._pids[missing]}) {what}")

    def _exchange_by_group(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        mine = torch.tensor([*numbers, 0])
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(parts, mine, group=self.group)
        except RuntimeError as error:
            raise PeerError(f"rank {self.rank} of {self.size} waited in vain for another: {error}") from error
        return [tuple(part[:-1].tolist()) for part in parts]

    def close(self) -> None:
        """Stop watching the others."""
        for watched in self._watched:
            if watched is not None:
                os.close(watched)
        self._watched = []


def _map(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    path = f"/proc/{'self' if pid == os.getpid() else pid}/fd/{fd}"
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(opened, nbytes)
    finally:
        os.close(opened)


def _watch(pid: int) -> int | None:
    """A file that becomes readable when the process ends; ``None`` where the system has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds; torch has no public way to ask, and ``tests`` notice when this one moves."""
    try:
        return group_timeout(group).total_seconds()
    except (AttributeError, RuntimeError):
        return 1800.0
