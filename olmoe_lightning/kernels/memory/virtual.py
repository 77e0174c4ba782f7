"""Symmetric memory of virtual ranks: threads of one process that behave like processes, or a group of one process."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from olmoe_lightning.kernels.memory.mapped_region import MappedRegion
from olmoe_lightning.kernels.memory.symmetric import PeerError, Region, SymmetricMemory


class VirtualRanks:
    """What the virtual ranks of one group have in common.

    Args:
        size: their number.
        timeout: seconds that they wait for each other.
    """

    def __init__(self, size: int, timeout: float = 60) -> None:
        self.size, self.timeout = size, timeout
        self._changed = threading.Condition()
        self._posted: list[list[Any]] = [[] for _ in range(size)]

    def memory(self, rank: int) -> VirtualMemory:
        """The view of one rank, to be used by one thread."""
        return VirtualMemory(self, rank)

    def gather(self, rank: int, call: int, mine: Any) -> list[Any]:
        """What each rank gives at its call of this number.

        Raises:
            PeerError: one did not come.
        """
        with self._changed:
            self._posted[rank].append(mine)
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(len(each) > call for each in self._posted), self.timeout)
            missing = [other for other, each in enumerate(self._posted) if len(each) <= call]
            if missing:
                raise PeerError(
                    f"virtual rank {rank} of {self.size} waited {self.timeout} s in vain for ranks {missing}"
                )
            return [each[call] for each in self._posted]


class VirtualMemory(SymmetricMemory):
    """One virtual rank's view."""

    def __init__(self, ranks: VirtualRanks, rank: int) -> None:
        self.rank, self.size = rank, ranks.size
        self._ranks, self._calls = ranks, 0

    def _gather(self, mine: Any) -> list[Any]:
        if self.size == 1:
            return [mine]
        self._calls += 1
        return self._ranks.gather(self.rank, self._calls - 1, mine)

    @override
    def allocate(self, nbytes: int) -> Region:
        """A mapping of each rank, shared by the threads."""
        return MappedRegion(self._gather(mmap.mmap(-1, max(nbytes, 1))), nbytes)

    @override
    def exchange(self, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Numbers of all threads."""
        return self._gather(tuple(numbers))

    @override
    def close(self) -> None:
        """Nothing is held."""
