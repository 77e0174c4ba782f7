"""Symmetric memory of GPUs that reach each other directly (one NVLink domain), by torch's own.

The host numbers travel over a gloo group of the same processes, which waits for no device. Barriers are kernels on the
current stream: a process that does not come shows there as a kernel that does not end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from olmoe_lightning.kernels.symmetric_memory import PeerError, Region, SymmetricMemory


class _CudaRegion(Region):
    def __init__(self, own: Tensor, handle: Any) -> None:
        super().__init__(own.numel())
        self.own, self.handle = own, handle  # the memory lives as long as the tensor

    def storage(self, rank: int) -> Tensor:
        """The bytes of one process, addressed through this device."""
        return self.handle.get_buffer(rank, (self.nbytes,), torch.uint8)


class CudaMemory(SymmetricMemory):
    """Memory of the GPUs of a group; made by all of them together.

    Args:
        group: of the processes, one GPU each.
        device: of this process.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self._host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._barrier: _CudaRegion = self._make(4096)

    def _make(self, nbytes: int) -> _CudaRegion:
        from torch.distributed import _symmetric_memory as torch_memory

        own = torch_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
        return _CudaRegion(own, torch_memory.rendezvous(own, self.group))

    def allocate(self, nbytes: int) -> Region:
        """Taken at once; collective, and it waits for the device."""
        return self._make(nbytes)

    def exchange(self, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Numbers over the host; the barrier is put onto the current stream."""
        found: list[tuple[int, ...]] = [()] * self.size
        if numbers:
            mine = torch.tensor(list(numbers))
            parts = [torch.empty_like(mine) for _ in range(self.size)]
            try:
                dist.all_gather(parts, mine, group=self._host)
            except RuntimeError as error:
                raise PeerError(f"rank {self.rank} of {self.size} waited in vain for another: {error}") from error
            found = [tuple(part.tolist()) for part in parts]
        self._barrier.handle.barrier(channel=0)
        return found

    def close(self) -> None:
        """Nothing is held besides the regions."""
