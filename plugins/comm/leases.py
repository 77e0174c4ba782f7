"""Receive buffers that peers write into: each is leased from a dispatch until no tensor reads it any more."""

from __future__ import annotations

import torch
from torch import Tensor

from olmoe_lightning.kernels.memory.symmetric import Region, SymmetricMemory, carve
from olmoe_lightning.kernels.routes import Window


class LeaseError(RuntimeError):
    """A buffer was to be used that is leased, or one more than allowed."""


class Lease:
    """The use of one buffer, from a dispatch until the last tensor that reads it is gone.

    That may be a saved tensor of a backward pass, of a recomputation, or of the part of a split backward that comes
    later. The lease ends with the storage of that tensor, and needs no call to end it.
    """

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer
        self.held = True

    def end(self) -> None:
        """Called when the last tensor is gone."""
        self.held = False


class LeasePool:
    """Buffers of one communication plugin. All processes make them together; each leases its own by itself.

    Args:
        memory: where they are.
        most: how many there may be; ``None`` for as many as are in flight.
    """

    def __init__(self, memory: SymmetricMemory, most: int | None = None) -> None:
        self.memory, self.most = memory, most
        self.regions: list[Region] = []
        self.leases: dict[int, Lease] = {}
        """The last one of each buffer, over or not."""

    def free(self, nbytes: int) -> int:
        """A buffer of this process that is large enough and not leased; -1 when there is none."""
        for buffer, region in enumerate(self.regions):
            if region.nbytes >= nbytes and not self.leased(buffer):
                return buffer
        return -1

    def leased(self, buffer: int) -> bool:
        """Whether a buffer of this process is in use."""
        lease = self.leases.get(buffer)
        return lease is not None and lease.held

    @property
    def in_use(self) -> int:
        """Leased buffers of this process."""
        return sum(lease.held for lease in self.leases.values())

    def agree(self, nbytes: int) -> list[int]:
        """The buffer into which each process receives next, by rank; one more is made for those that have none free.

        Collective, and a barrier.

        Raises:
            LeaseError: on all processes, when a process needs more buffers than there may be.
        """
        found = [buffer for (buffer,) in self.memory.exchange([self.free(nbytes)])]
        if min(found) >= 0:
            return found
        if self.most is not None and len(self.regions) >= self.most:
            raise LeaseError(
                f"all {len(self.regions)} receive buffers of a process are leased to microbatches whose backward pass "
                f"has not read them (ranks {[rank for rank, buffer in enumerate(found) if buffer < 0]}); allow more "
                f"than max_buffers={self.most}, or have fewer microbatches in flight"
            )
        # To a power of two, so that batches that grow do not need a new buffer each time; untouched bytes cost nothing.
        self.regions.append(self.memory.allocate(1 << max(nbytes - 1, 1).bit_length()))
        return [buffer if buffer >= 0 else len(self.regions) - 1 for buffer in found]

    def lease(self, buffer: int) -> Tensor:
        """All bytes of a buffer of this process; the lease ends with the last tensor that is made of them.

        Raises:
            LeaseError: it is leased.
        """
        if self.leased(buffer):
            raise LeaseError(f"receive buffer {buffer} is leased and cannot be used again before its lease is over")
        lease = self.leases[buffer] = Lease(buffer)
        return self.regions[buffer].storage(self.memory.rank, on_release=lease.end)


class Layout:
    """Where rows and weights stand in a buffer.

    Args:
        capacity: C, rows.
        d_model: D.
        dtype: of the rows.
    """

    def __init__(self, capacity: int, d_model: int, dtype: torch.dtype) -> None:
        self.capacity, self.d_model, self.dtype = capacity, d_model, dtype
        rows = (capacity + 1) * d_model * dtype.itemsize  # and a spare one, see Window
        self._weights = -(-rows // 64) * 64
        self.nbytes = self._weights + 4 * (capacity + 1)

    @classmethod
    def of(cls, rows: Tensor, capacity: int) -> Layout:
        """For rows of the same width and dtype as these."""
        return cls(capacity, rows.shape[1], rows.dtype)

    def window(self, storage: Tensor) -> Window:
        """Rows and weights of a buffer."""
        rows = carve(storage, (self.capacity + 1, self.d_model), self.dtype, 0)
        return Window(rows, carve(storage, (self.capacity + 1,), torch.float32, self._weights))
