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
from typing import NamedTuple

import torch.distributed as dist
from typing_extensions import override

from olmoe_lightning._torch import group_timeout
from olmoe_lightning.kernels.cpu.native import library, unavailable_reason
from olmoe_lightning.kernels.memory.host import gather_numbers, gather_objects
from olmoe_lightning.kernels.memory.mapped_region import MappedRegion
from olmoe_lightning.kernels.memory.symmetric import MAX_NUMBERS, PeerError, Region, SymmetricMemory

_BLOCK = 4096
"""Bytes of a process' block of barrier words, see ``cpu/peers.cpp``. The last eight are a token that identifies it."""
_SLICE_SECONDS = 0.1
"""A wait looks so often whether the other processes still live."""
_ENDING_SECONDS = 1.0

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


class _Peer(NamedTuple):
    """What the others must know of a process to map its block."""

    host: str
    pid: int
    block: int
    """Number of its open file."""
    token: bytes
    native: bool
    """Whether the barrier's kernels run there."""


class PosixMemory(SymmetricMemory):
    """Memory that the processes of a group on one host share; made by all of them together.

    Args:
        group: a process group that can carry objects; it is used here only, and for exchanges where the barrier in
            shared memory is missing (no C++ compiler).
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
            mine = _Peer(socket.gethostname(), os.getpid(), block, token, unavailable_reason() is None)
            peers: list[_Peer] = gather_objects(group, mine)
            maps, problem = self._map_blocks(peers)
            problems: list[str | None] = gather_objects(group, problem)
        finally:
            os.close(block)
        if any(problems):
            hosts = sorted({peer.host for peer in peers})
            raise ValueError(
                f"{next(filter(None, problems))}; the processes are on hosts {', '.join(hosts)}: {ELSEWHERE}"
            )
        self._pids = [peer.pid for peer in peers]
        self._watched = [_watch(pid) for pid in self._pids]
        self._native = all(peer.native for peer in peers)
        self._maps = maps
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in maps]
        self._blocks = (ctypes.c_void_p * self.size)(*addresses)

    def _map_blocks(self, peers: Sequence[_Peer]) -> tuple[list[mmap.mmap], str | None]:
        """The blocks of all processes by rank, or why one cannot be mapped."""
        maps: list[mmap.mmap] = []
        for other, peer in enumerate(peers):
            try:
                each = _map(peer.pid, peer.block, _BLOCK)
            except OSError as error:
                where = f"rank {other} (process {peer.pid} on {peer.host})"
                return maps, f"rank {self.rank} cannot open the memory of {where}: {error}"
            if each[-8:] != peer.token:
                return maps, f"rank {self.rank} finds another process than rank {other} under the number {peer.pid}"
            maps.append(each)
        return maps, None

    @override
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

    @override
    def exchange(self, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Over words in shared memory, or over the group where there are no compiled kernels."""
        count = len(numbers)
        if count > MAX_NUMBERS:
            raise ValueError(f"an exchange carries at most {MAX_NUMBERS} numbers, got {count}")
        if not self._native:
            try:
                return gather_numbers(self.group, numbers)
            except PeerError as error:
                # A process' connections close a moment before the system says that it has ended.
                if ended := self._ended([peer for peer in range(self.size) if peer != self.rank], _ENDING_SECONDS):
                    raise PeerError(self._named(ended[0], "has ended")) from error
                raise
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        mine, all_numbers = (ctypes.c_int64 * count)(*numbers), (ctypes.c_int64 * (count * self.size))()
        sequence = ctypes.c_int32(self._sequence)
        rank, size, n = (ctypes.c_int64(value) for value in (self.rank, self.size, count))
        library().peers_post(self._blocks, rank, sequence, mine, n)
        read = library().peers_read
        read.restype = ctypes.c_int64
        started = time.monotonic()

        def missing(seconds: float) -> int:
            """A rank that has not posted after so long; -1 when all have."""
            found: int = read(self._blocks, size, sequence, n, ctypes.c_double(seconds), all_numbers)
            return found

        while (peer := missing(min(_SLICE_SECONDS, self.timeout))) >= 0:
            # A process may post and then end: its words are read once more before it counts as missing.
            self._check(peer, started, lambda: missing(0))
        return [tuple(all_numbers[rank * count : (rank + 1) * count]) for rank in range(self.size)]

    def _check(self, missing: int, started: float, read_again: Callable[[], int]) -> None:
        waited = time.monotonic() - started
        ended = bool(self._ended([missing]))
        if (ended or waited > self.timeout) and read_again() == missing:
            raise PeerError(self._named(missing, "has ended" if ended else f"did not come within {waited:.0f} s"))

    def _ended(self, ranks: Sequence[int], seconds: float = 0.0) -> list[int]:
        """Those of the ranks whose processes have ended, or end within so long."""
        watched = {file: rank for rank in ranks if (file := self._watched[rank]) is not None}
        return [watched[file] for file in select.select(list(watched), [], [], seconds)[0]]

    def _named(self, rank: int, what: str) -> str:
        return f"rank {rank} of {self.size} (process {self._pids[rank]}) {what}"

    @override
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
    """Seconds; torch has no public name for it, and a test fails when the private one moves."""
    try:
        return group_timeout(group).total_seconds()
    except (AttributeError, RuntimeError):
        return 1800.0
