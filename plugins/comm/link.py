"""What the processes of a rowwise plugin share: memory, receive buffers, metadata, and the two movements of rows.

T tokens, K chosen experts, E_local experts of each process, N processes, D model width, C rows that fit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from olmoe_lightning.kernels.memory.symmetric import Region, SymmetricMemory, carve
from olmoe_lightning.kernels.routes import Routes, Window
from olmoe_lightning.kernels.rowwise import gather_weights, publish_rows, put_rows, sum_rows
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.base import CommSpec
from olmoe_lightning.plugins.comm.leases import Layout, LeasePool


class DoubleBuffer:
    """Two halves of shared memory that consecutive exchanges use alternately.

    A process reuses a half only after the barrier of the exchange in between, and every other process enters that
    barrier only after it has read the half. So two halves are enough, and no further barrier protects them.
    """

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory = memory
        self._region: Region | None = None
        self._half = 0

    def next(self, nbytes: int) -> list[Tensor]:
        """The other half on all processes, by rank, each of at least so many bytes; the same number on all."""
        self._half ^= 1
        half = -(-nbytes // 64) * 64
        if self._region is None or self._region.nbytes < 2 * half:
            half = 1 << max(half - 1, 1).bit_length()
            self._region = self._memory.allocate(2 * half)  # collective: all came to the same size
        half = self._region.nbytes // 2
        storages = [self._region.storage(rank) for rank in range(self._memory.size)]
        return [storage[self._half * half : (self._half + 1) * half] for storage in storages]


class Metadata(NamedTuple):
    """What the processes know of each other's dispatch."""

    tensors: list[Tensor]
    """By rank, in the memory of each process: valid until the exchange after the next one writes its own."""
    buffers: list[int]
    """By rank: the buffer into which each process receives."""


class Link:
    """One process' end of what a plugin has set up on an axis.

    Args:
        memory: of the processes.
        axis: of the same processes.
        spec: of what is sent.
        max_buffers: most receive buffers of a process; ``None`` for as many as are in flight.
    """

    def __init__(self, memory: SymmetricMemory, axis: Axis, spec: CommSpec, max_buffers: int | None = None) -> None:
        self.memory, self.axis, self.spec = memory, axis, spec
        self.pool = LeasePool(memory, max_buffers)
        self._metadata = DoubleBuffer(memory)
        self._published = DoubleBuffer(memory)

    def exchange_metadata(self, own: Tensor, layout: Layout, shapes: list[tuple[int, ...]]) -> Metadata:
        """Show all processes a tensor of 32-bit integers, and agree on the buffers that receive next; a barrier.

        Args:
            own: int32, of this process.
            layout: of what will be received.
            shapes: of every process' tensor, by rank.
        """
        sizes = [4 * torch.Size(shape).numel() for shape in shapes]
        storages = self._metadata.next(max(*sizes, 4))
        tensors = [carve(storage, shape, torch.int32, 0) for storage, shape in zip(storages, shapes, strict=True)]
        tensors[self.memory.rank].copy_(own)
        return Metadata(tensors, self.pool.agree(layout.nbytes))

    def write(
        self, x_TD: Tensor, weights_TK: Tensor | None, routes: Routes, layout: Layout, buffers: list[int]
    ) -> Window:
        """Tokens to rows; what this process received, leased."""
        rank, regions = self.memory.rank, self.pool.regions
        storages = [
            self.pool.lease(buffer) if peer == rank else regions[buffer].storage(peer)
            for peer, buffer in enumerate(buffers)
        ]
        windows = [layout.window(storage) for storage in storages]
        put_rows(x_TD, weights_TK, routes, windows)
        self.memory.exchange()
        return Window(windows[rank].rows[: layout.capacity], windows[rank].weights[: layout.capacity])

    def read(
        self, rows_CD: Tensor, weights_C: Tensor | None, routes: Routes, received_NL: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Rows to sums of tokens, and the numbers beside the rows, if there are any, to one per route."""
        rank, layout = self.memory.rank, Layout.of(rows_CD, len(rows_CD))
        windows = [layout.window(storage) for storage in self._published.next(layout.nbytes)]
        own = publish_rows(rows_CD, weights_C, received_NL, rank, windows[rank])
        self.memory.exchange()
        rows = [own if peer == rank else window.rows for peer, window in enumerate(windows)]
        weights = None if weights_C is None else gather_weights([window.weights for window in windows], routes)
        return sum_rows(rows, routes), weights
