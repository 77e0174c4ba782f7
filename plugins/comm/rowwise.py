"""Rows are written straight into their place on the process that has their expert; nobody permutes anything.

    dispatch: count -> meet -> write each row to (process, row) of its expert                     -> meet -> experts
    combine:  publish the experts' rows -> meet -> read the rows of each token from where they are, and add them

The way back of each is the other: the gradients of dispatched rows are read and added, those of combined tokens are
written to the rows. Where a row goes is computed from the counts of all processes, with operations on tensors: no
process asks for a value on the host. Only shapes, which the host knows anyway, are exchanged from host to host.

T tokens, K chosen experts, E experts of all processes, E_local of each, N processes, D model width, C rows that fit.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from olmoe_lightning.kernels import Dispatched
from olmoe_lightning.kernels.posix_memory import PosixMemory, posix_memory_missing
from olmoe_lightning.kernels.rowwise import (
    Routes,
    Window,
    count_routes,
    gather_weights,
    plan_routes,
    publish_rows,
    put_rows,
    sum_rows,
)
from olmoe_lightning.kernels.symmetric_memory import PeerError, Region, SymmetricMemory
from olmoe_lightning.kernels.virtual_memory import VirtualRanks
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.base import CommPlugin, CommSpec, check_operands, describe, experts_per_process
from olmoe_lightning.plugins.comm.leases import Layout, LeasePool


class _Turns:
    """Shared memory used in turn by one exchange after the other, two places each.

    Two are enough: who writes to a place for the next but one exchange has met all others in the next, and they came
    there after they had read the last.
    """

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory = memory
        self._region: Region | None = None
        self._turn = 0

    def next(self, nbytes: int) -> list[Tensor]:
        """The storages of all processes for this turn, each of at least so many bytes; the same number on all."""
        self._turn ^= 1
        half = -(-nbytes // 64) * 64
        if self._region is None or self._region.nbytes < 2 * half:
            half = 1 << max(half - 1, 1).bit_length()
            self._region = self._memory.allocate(2 * half)  # collective: all came to the same size
        half = self._region.nbytes // 2
        storages = [self._region.storage(rank) for rank in range(self._memory.size)]
        return [storage[self._turn * half : (self._turn + 1) * half] for storage in storages]


class Link:
    """What one plugin has in common with its peers: memory, receive buffers, and the two movements of rows.

    Args:
        memory: of the processes.
        max_buffers: see :class:`RowwiseComm`.
    """

    def __init__(self, memory: SymmetricMemory, max_buffers: int | None = None) -> None:
        self.memory = memory
        self.pool = LeasePool(memory, max_buffers)
        self.notices = _Turns(memory)
        self._published = _Turns(memory)

    def agree(self, layout: Layout) -> list[int]:
        """Where each process receives next; a barrier."""
        return self.pool.agree(layout.nbytes)

    def write(
        self, x_TD: Tensor, weights_TK: Tensor | None, routes: Routes, layout: Layout, buffers: list[int]
    ) -> Window:
        """Tokens to rows; what this process received, leased."""
        rank, regions = self.memory.rank, self.pool.regions
        storages = [
            self.pool.lease(buffer) if peer == rank else regions[buffer].storage(peer)
            for peer, buffer in enumerate(buffers)
        ]
        windows = layout.windows(storages)
        put_rows(x_TD, weights_TK, routes, windows)
        self.memory.exchange()
        return Window(windows[rank].rows[: layout.capacity], windows[rank].weights[: layout.capacity])

    def read(
        self, rows_CD: Tensor, weights_C: Tensor | None, routes: Routes, received_NL: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor | None]:
        """Rows to sums of tokens, and what stands beside the rows to one number per route."""
        rank = self.memory.rank
        windows = layout.windows(self._published.next(layout.nbytes))
        own = publish_rows(rows_CD, weights_C, received_NL, rank, windows[rank])
        self.memory.exchange()
        rows = [own if peer == rank else window.rows for peer, window in enumerate(windows)]
        weights = None if weights_C is None else gather_weights([window.weights for window in windows], routes)
        return sum_rows(rows, routes), weights


class _Handle(NamedTuple):
    routes: Routes
    received_NL: Tensor
    layout: Layout


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        rank_TK: Tensor,
        row_TK: Tensor,
        received_NL: Tensor,
        plugin: RowwiseComm,
        layout: Layout,
        buffers: list[int],
    ) -> tuple[Tensor, Tensor]:
        # Saved, not kept: where the forward pass is computed again, the rows stand where that one says.
        ctx.save_for_backward(rank_TK, row_TK, received_NL)
        ctx.plugin, ctx.layout = plugin, layout
        with plugin.waiting("rows"):
            return plugin.link.write(x_TD, weights_TK, Routes(rank_TK, row_TK), layout, buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_CD: Tensor, grad_weights_C: Tensor) -> tuple[Tensor | None, ...]:
        # Both are published whatever is needed here: other processes count on it. What a loss does not use is zero.
        rank_TK, row_TK, received = ctx.saved_tensors
        with ctx.plugin.waiting("gradients of rows"):
            grad_x, grad_weights = ctx.plugin.link.read(
                grad_CD, grad_weights_C, Routes(rank_TK, row_TK), received, ctx.layout
            )
        return grad_x, grad_weights, None, None, None, None, None, None


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_CD: Tensor,
        rank_TK: Tensor,
        row_TK: Tensor,
        received_NL: Tensor,
        plugin: RowwiseComm,
        layout: Layout,
    ) -> Tensor:
        ctx.save_for_backward(rank_TK, row_TK)
        ctx.plugin, ctx.layout = plugin, layout
        with plugin.waiting("rows on their way home"):
            return plugin.link.read(rows_CD, None, Routes(rank_TK, row_TK), received_NL, layout)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        routes, link = Routes(*ctx.saved_tensors), ctx.plugin.link
        with ctx.plugin.waiting("gradients on their way to the experts"):
            buffers = link.agree(ctx.layout)
            grad_CD = link.write(grad_TD, None, routes, ctx.layout, buffers).rows
        return grad_CD, None, None, None, None, None


class RowwiseComm(CommPlugin):
    """Every process writes into, and reads from, the memory of the others.

    Rows are received in buffers of fixed size. One is leased at each dispatch, until nothing reads its rows any more:
    after the backward pass, whenever that is. ``pool`` shows them; there are as many as are in flight at once.

    Args:
        max_buffers: most receive buffers of a process; a dispatch that needs another one raises. ``None``: as many as
            are needed.
    """

    name: ClassVar[str] = "rowwise"

    def __init__(self, max_buffers: int | None = None) -> None:
        if max_buffers is not None and max_buffers < 1:
            raise ValueError(f"max_buffers ({max_buffers}) must be at least 1")
        self.max_buffers = max_buffers
        self._axis: Axis | None = None
        self._spec: CommSpec | None = None
        self._link: Link | None = None

    @classmethod
    def unavailable(cls, axis_size: int, device: torch.device) -> str | None:
        """It needs memory that all processes can map."""
        if device.type != "cpu":
            return f"its kernels for devices of type {device.type!r} are not part of this version yet"
        if axis_size > 1 and (reason := posix_memory_missing()):
            return reason
        return None

    def setup(self, axis: Axis, spec: CommSpec) -> None:
        """Meet the others in shared memory; buffers are made by the first dispatches."""
        if reason := self.unavailable(axis.size, spec.device):
            raise ValueError(f"comm {self.name!r} cannot serve {describe(axis)}: {reason}")
        experts_per_process(self.name, axis, spec)
        memory: SymmetricMemory
        if axis.size == 1:
            memory = VirtualRanks(1).memory(0)
        else:
            if axis.group is None:
                raise ValueError(f"comm {self.name!r} needs a process group, but {describe(axis)} has none")
            try:
                memory = PosixMemory(axis.group)
            except ValueError as error:
                raise ValueError(f"comm {self.name!r} cannot serve {describe(axis)}: {error}") from error
        self.setup_on(memory, axis, spec)

    def setup_on(self, memory: SymmetricMemory, axis: Axis, spec: CommSpec) -> None:
        """As ``setup``, on memory that is there already."""
        mine = [spec.num_experts, spec.top_k, spec.d_model, spec.dtype.itemsize]
        everyone = memory.exchange(mine)
        if len(set(everyone)) > 1:
            raise ValueError(
                f"comm {self.name!r}: the processes of axis {axis.name!r} differ in (num_experts, top_k, d_model, "
                f"bytes per value): rank {axis.rank} has {mine}, all have {list(map(list, everyone))}"
            )
        self._axis, self._spec, self._link = axis, spec, Link(memory, self.max_buffers)

    @property
    def link(self) -> Link:
        """Memory and buffers.

        Raises:
            RuntimeError: there was no ``setup``.
        """
        if self._link is None:
            raise RuntimeError(f"comm {self.name!r}: setup() comes before dispatch()")
        return self._link

    @property
    def pool(self) -> LeasePool:
        """The receive buffers and their leases."""
        return self.link.pool

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Write each token to its experts' rows, wherever they are."""
        link = self.link
        assert self._axis is not None
        assert self._spec is not None
        check_operands(describe(self._axis), self._spec, x_TD, expert_ids_TK, weights_TK)
        with self.waiting("counts"), torch.no_grad():
            layout = self._layout(len(x_TD))
            counts = count_routes(expert_ids_TK, None, self._spec.num_experts)
            notices = [storage[: 4 * len(counts)].view(torch.int32) for storage in link.notices.next(4 * len(counts))]
            notices[self._axis.rank].copy_(counts)
            buffers = link.agree(layout)
            counts_NE = torch.stack(notices)
            routes, received, ends = plan_routes(expert_ids_TK, None, counts_NE, self._axis.rank)
        rows, row_weights = _ToExperts.apply(x_TD, weights_TK, *routes, received, self, layout, buffers)
        return Dispatched(rows, row_weights, ends, _Handle(routes, received, layout))

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Read each token's rows from where they are, and add them."""
        return _Home.apply(rows_RD, *handle.routes, handle.received_NL, self, handle.layout)

    def teardown(self) -> None:
        """Give the memory back; what autograd still holds goes with it."""
        if self._link is not None:
            self._link.memory.close()
        self._axis = self._spec = self._link = None

    def _layout(self, tokens: int) -> Layout:
        """Shapes are known on the host; those of the others come over the host."""
        assert self._spec is not None
        everyone = [count for (count,) in self.link.memory.exchange([tokens])]
        return Layout(sum(everyone) * self._spec.top_k, self._spec.d_model, self._spec.dtype)

    def waiting(self, what: str) -> _Waiting:
        """A context in which a process that does not come is named."""
        return _Waiting(self, what)


class _Waiting:
    def __init__(self, plugin: RowwiseComm, what: str) -> None:
        self._plugin, self._what = plugin, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        axis = self._plugin._axis
        if isinstance(error, PeerError) and axis is not None:
            raise RuntimeError(
                f"comm {self._plugin.name!r} on {describe(axis)}: the exchange of {self._what} failed: {error}; most "
                f"often because that process of the axis (global ranks {list(axis.ranks)}) has ended or does something "
                "else"
            ) from error
