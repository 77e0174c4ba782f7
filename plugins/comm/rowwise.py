"""Rows are written straight into their place on the process that has their expert; nobody permutes anything.

    dispatch: count -> meet -> write each row to (process, row) of its expert                     -> meet -> experts
    combine:  publish the experts' rows -> meet -> read the rows of each token from where they are, and add them

The way back of each is the other: the gradients of dispatched rows are read and added, those of combined tokens are
written to the rows. Where a row goes is computed from the counts of all processes, with operations on tensors: no
process asks for a value on the host. Only shapes, which the host knows anyway, are exchanged from host to host.

T tokens, K chosen experts, F further ones in the router's order, E experts of all processes, E_local of each,
N processes, D model width, C rows that fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from olmoe_lightning._torch import assert_async
from olmoe_lightning.errors import UserError
from olmoe_lightning.kernels import Dispatched
from olmoe_lightning.kernels.memory.cuda import CudaMemory, VirtualDeviceMemory, cuda_memory_missing
from olmoe_lightning.kernels.memory.posix import PosixMemory, posix_memory_missing
from olmoe_lightning.kernels.memory.symmetric import PeerError, Region, SymmetricMemory, carve
from olmoe_lightning.kernels.memory.virtual import VirtualRanks
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
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.base import CommPlugin, CommSpec, check_operands, describe, experts_per_process
from olmoe_lightning.plugins.comm.capacity import Admitted, DropCounters, Overflow, admit
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


class _Told(NamedTuple):
    notices: list[Tensor]
    """Of every process, in its memory: valid until the notice after the next is written."""
    buffers: list[int]


class Link:
    """What one plugin has in common with its peers: memory, receive buffers, and the two movements of rows.

    Args:
        memory: of the processes.
        max_buffers: see :class:`RowwiseComm`.
    """

    def __init__(self, memory: SymmetricMemory, max_buffers: int | None = None) -> None:
        self.memory = memory
        self.pool = LeasePool(memory, max_buffers)
        self._notices = _Turns(memory)
        self._published = _Turns(memory)

    def tell(self, notice: Tensor, layout: Layout, shapes: list[tuple[int, ...]]) -> _Told:
        """Give all processes a tensor of 32-bit integers and agree on where each receives next.

        Args:
            notice: int32, of this process.
            layout: of what will be received.
            shapes: of every process' notice, by rank.
        """
        sizes = [4 * torch.Size(shape).numel() for shape in shapes]
        storages = self._notices.next(max(*sizes, 4))
        notices = [carve(storage, shape, torch.int32, 0) for storage, shape in zip(storages, shapes, strict=True)]
        notices[self.memory.rank].copy_(notice)
        return _Told(notices, self.agree(layout))

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
    capacity: int


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
        count: Callable[[], None] | None,
    ) -> tuple[Tensor, Tensor]:
        # Saved, not kept: where the forward pass is computed again, the rows stand where that one says.
        ctx.save_for_backward(rank_TK, row_TK, received_NL)
        ctx.plugin, ctx.capacity, ctx.count = plugin, layout.capacity, count
        with plugin.waiting("rows"):
            return plugin.link.write(x_TD, weights_TK, Routes(rank_TK, row_TK), layout, buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_CD: Tensor, grad_weights_C: Tensor) -> tuple[Tensor | None, ...]:
        # Both are published whatever is needed here: other processes count on it. What a loss does not use is zero.
        rank_TK, row_TK, received = ctx.saved_tensors
        if ctx.count is not None:
            ctx.count()  # here, since the forward pass may be computed again
        with ctx.plugin.waiting("gradients of rows"):
            layout = Layout.of(grad_CD, ctx.capacity)
            grad_x, grad_weights = ctx.plugin.link.read(
                grad_CD, grad_weights_C, Routes(rank_TK, row_TK), received, layout
            )
        return grad_x, grad_weights, *[None] * 7


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_CD: Tensor,
        rank_TK: Tensor,
        row_TK: Tensor,
        received_NL: Tensor,
        plugin: RowwiseComm,
    ) -> Tensor:
        ctx.save_for_backward(rank_TK, row_TK)
        ctx.plugin, ctx.capacity = plugin, len(rows_CD)
        with plugin.waiting("rows on their way home"):
            layout = Layout.of(rows_CD, len(rows_CD))
            return plugin.link.read(rows_CD, None, Routes(rank_TK, row_TK), received_NL, layout)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        routes, link = Routes(*ctx.saved_tensors), ctx.plugin.link
        with ctx.plugin.waiting("gradients on their way to the experts"):
            layout = Layout.of(grad_TD, ctx.capacity)
            grad_CD = link.write(grad_TD, None, routes, layout, link.agree(layout)).rows
        return grad_CD, None, None, None, None


class RowwiseComm(CommPlugin):
    """Every process writes into, and reads from, the memory of the others.

    Rows are received in buffers of fixed size. One is leased at each dispatch, until nothing reads its rows any more:
    after the backward pass, whenever that is. ``pool`` shows them; there are as many as are in flight at once.

    Args:
        capacity_factor: a process has room for ``ceil(capacity_factor * T * K)`` rows, T being the most tokens that one
            of the processes dispatches. ``None``: for all that could come, so that nothing is ever dropped.
        capacity_groups: G, equal groups of experts, each of which has its part of that room to itself. Any number of
            processes drops the same routes of the same tokens when G is the same. ``None``: each process is a group.
        overflow: what becomes of the routes that do not fit. ``drop``: those with the smallest router weights are left
            out. ``spill``: they go to the next expert of their token's ranking that has room, with the weight they
            have, and are left out when there is none among the next ``fallbacks``. ``error``: it is an error.
        fallbacks: F, experts that ``spill`` tries.
        seed: turns the order of routes with equal weights.
        max_buffers: most receive buffers of a process; a dispatch that needs another one raises. ``None``: as many as
            are needed.

    Raises:
        ValueError: an option is out of range.
    """

    name: ClassVar[str] = "rowwise"

    def __init__(
        self,
        capacity_factor: float | None = None,
        capacity_groups: int | None = None,
        overflow: Overflow = "drop",
        fallbacks: int = 2,
        seed: int = 0,
        max_buffers: int | None = None,
    ) -> None:
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise UserError(f"capacity_factor ({capacity_factor}) must be positive, or None for no limit")
        if overflow not in ("drop", "spill", "error"):
            raise UserError(f"overflow ({overflow!r}) must be 'drop', 'spill' or 'error'")
        if capacity_groups is not None and (capacity_groups < 1 or capacity_factor is None):
            raise UserError(
                f"capacity_groups ({capacity_groups}) must be at least 1, and need a capacity_factor "
                f"({capacity_factor})"
            )
        if fallbacks < 1:
            raise UserError(f"fallbacks ({fallbacks}) must be at least 1")
        if max_buffers is not None and max_buffers < 1:
            raise UserError(f"max_buffers ({max_buffers}) must be at least 1")
        self.capacity_factor, self.overflow, self.seed, self.max_buffers = capacity_factor, overflow, seed, max_buffers
        self.capacity_groups = capacity_groups
        self.fallbacks = fallbacks if overflow == "spill" and capacity_factor is not None else 0
        self.drops: DropCounters | None = None
        """What was dropped of this process' tokens, counted in backward passes; ``None`` while nothing can be."""
        self._axis: Axis | None = None
        self._spec: CommSpec | None = None
        self._link: Link | None = None

    @classmethod
    def unavailable(cls, axis_size: int, device: torch.device) -> str | None:
        """It needs memory that all processes can map: of one host, or of GPUs that reach each other."""
        missing = {"cpu": posix_memory_missing, "cuda": cuda_memory_missing}.get(device.type)
        if missing is None:
            return f"its kernels for devices of type {device.type!r} do not exist, only those for cpu and cuda"
        return missing() if axis_size > 1 else None

    def setup(self, axis: Axis, spec: CommSpec) -> None:
        """Meet the others in shared memory; buffers are made by the first dispatches."""
        if reason := self.unavailable(axis.size, spec.device):
            raise UserError(f"comm {self.name!r} cannot serve {describe(axis)}: {reason}")
        experts_per_process(self.name, axis, spec)
        if axis.size > 1 and axis.group is None:
            raise UserError(f"comm {self.name!r} needs a process group, but {describe(axis)} has none")
        try:
            memory = self._memory(axis, spec.device)
        except ValueError as error:
            raise UserError(f"comm {self.name!r} cannot serve {describe(axis)}: {error}") from error
        self.setup_on(memory, axis, spec)

    def _memory(self, axis: Axis, device: torch.device) -> SymmetricMemory:
        """The only place that chooses between kinds of memory."""
        cuda = device.type == "cuda"
        if axis.size == 1:
            alone = VirtualRanks(1)
            return VirtualDeviceMemory(alone, 0, device) if cuda else alone.memory(0)
        assert axis.group is not None
        return CudaMemory(axis.group, device) if cuda else PosixMemory(axis.group)

    def setup_on(self, memory: SymmetricMemory, axis: Axis, spec: CommSpec) -> None:
        """As ``setup``, on memory that is there already."""
        mine = [spec.num_experts, spec.top_k, spec.d_model, spec.dtype.itemsize]
        everyone = memory.exchange(mine)
        if len(set(everyone)) > 1:
            raise UserError(
                f"comm {self.name!r}: the processes of axis {axis.name!r} differ in (num_experts, top_k, d_model, "
                f"bytes per value): rank {axis.rank} has {mine}, all have {list(map(list, everyone))}"
            )
        if self.fallbacks > spec.num_experts - spec.top_k:
            raise UserError(
                f"comm {self.name!r}: fallbacks ({self.fallbacks}) are more than the experts that a token does not "
                f"choose (num_experts {spec.num_experts} - top_k {spec.top_k})"
            )
        groups = self.capacity_groups or axis.size
        if groups % axis.size or spec.num_experts % groups:
            raise UserError(
                f"comm {self.name!r}: capacity_groups ({groups}) must be a multiple of the {axis.size} processes and a "
                f"divisor of the {spec.num_experts} experts: each process has whole groups of experts"
            )
        self._axis, self._spec, self._link = axis, spec, Link(memory, self.max_buffers)
        if self.capacity_factor is not None:
            self.drops = DropCounters(spec.num_experts, axis.size, spec.device)

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

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, fallback_ids_TF: Tensor | None = None
    ) -> Dispatched:
        """Write each token to its experts' rows, wherever they are.

        Args:
            x_TD: [T, D].
            expert_ids_TK: int64 [T, K], global ids.
            weights_TK: fp32 [T, K].
            fallback_ids_TF: int64 [T, F], the next experts of each token's ranking; needed when ``overflow`` is
                ``spill``, where F is ``fallbacks``.
        """
        link, spec, axis = self.link, self._spec, self._axis
        assert axis is not None
        assert spec is not None
        check_operands(describe(axis), spec, x_TD, expert_ids_TK, weights_TK)
        if self.fallbacks and (fallback_ids_TF is None or fallback_ids_TF.shape != (len(x_TD), self.fallbacks)):
            found = None if fallback_ids_TF is None else tuple(fallback_ids_TF.shape)
            raise UserError(
                f"comm {self.name!r} on {describe(axis)}: overflow 'spill' needs fallback_ids_TF of shape "
                f"{(len(x_TD), self.fallbacks)}, got {found}"
            )
        with self.waiting("counts"), torch.no_grad():
            tokens = [count for (count,) in link.memory.exchange([len(x_TD)])]  # shapes, which the host knows
            layout = Layout.of(x_TD, self._capacity(tokens))
            if self.capacity_factor is None:
                keep, count = None, None
                counts = count_routes(expert_ids_TK, None, spec.num_experts)
                told = link.tell(counts, layout, [(spec.num_experts,)] * axis.size)
                counts_NE = torch.stack(told.notices)
            else:
                told, admitted = self._admit(expert_ids_TK, weights_TK, fallback_ids_TF, tokens, layout)
                ids_by_rank, keep_by_rank = (each.split(tokens) for each in admitted)
                parts = zip(ids_by_rank, keep_by_rank, strict=True)
                counts_NE = torch.stack([count_routes(ids, kept, spec.num_experts) for ids, kept in parts])
                wanted, expert_ids_TK, keep = expert_ids_TK, ids_by_rank[axis.rank], keep_by_rank[axis.rank]
                assert self.drops is not None
                count = functools.partial(self.drops.add, wanted, expert_ids_TK, keep, weights_TK.detach())
            routes, received, ends = plan_routes(expert_ids_TK, keep, counts_NE, axis.rank)
        rows, row_weights = _ToExperts.apply(x_TD, weights_TK, *routes, received, self, layout, told.buffers, count)
        return Dispatched(rows, row_weights, ends, _Handle(routes, received, layout.capacity))

    def _capacity(self, tokens: list[int]) -> int:
        """Rows that fit, of which all groups of a process together have no more than there can be."""
        assert self._spec is not None
        assert self._axis is not None
        most = sum(tokens) * self._spec.top_k
        if self.capacity_factor is None:
            return most
        return min(most, self._room(tokens) * (self._groups // self._axis.size))

    def _room(self, tokens: list[int]) -> int:
        """Rows that a group of experts may get."""
        assert self._spec is not None
        assert self.capacity_factor is not None
        routes = max(tokens) * len(tokens) * self._spec.top_k  # integers first: all numbers of processes round alike
        return math.ceil(self.capacity_factor * routes / self._groups)

    @property
    def _groups(self) -> int:
        assert self._axis is not None
        return self.capacity_groups or self._axis.size

    def _admit(
        self, ids_TK: Tensor, weights_TK: Tensor, fallback_ids_TF: Tensor | None, tokens: list[int], layout: Layout
    ) -> tuple[_Told, Admitted]:
        """Tell all processes the whole routing, and decide as they do."""
        assert self._spec is not None
        assert self._axis is not None
        spec, k, room = self._spec, self._spec.top_k, self._room(tokens)
        # One notice: the weights' bits, the experts and the fallbacks, all of 32 bits.
        parts = [weights_TK.detach().float().contiguous().view(torch.int32), ids_TK.to(torch.int32)]
        if self.fallbacks:
            assert fallback_ids_TF is not None
            parts.append(fallback_ids_TF.to(torch.int32))
        notice = torch.cat(parts, 1)
        told = self.link.tell(notice, layout, [(count, notice.shape[1]) for count in tokens])
        everyone = torch.cat(told.notices)
        weights = everyone[:, :k].contiguous().view(torch.float32)
        ids, fallback = everyone[:, k : 2 * k].long(), everyone[:, 2 * k :].long()
        admitted = admit(
            ids, weights, fallback if self.fallbacks else None, room, spec.num_experts, self._groups, self.seed
        )
        if self.overflow == "error":
            whom = "a process" if self._groups == self._axis.size else f"one of {self._groups} groups of experts"
            assert_async(
                admitted.keep_AK.all(),
                f"comm {self.name!r}: more routes go to {whom} than the {room} rows that it has room for "
                f"(capacity_factor {self.capacity_factor}, at most {max(tokens)} tokens of a process, top_k {k}); "
                "raise capacity_factor, or choose overflow 'drop' or 'spill'",
            )
        return told, admitted

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Read each token's rows from where they are, and add them."""
        assert self._axis is not None
        assert self._spec is not None
        if rows_RD.shape != (handle.capacity, self._spec.d_model):
            raise UserError(
                f"combine on {describe(self._axis)}: rows of shape {(handle.capacity, self._spec.d_model)} expected, "
                f"as they were dispatched, got {tuple(rows_RD.shape)}"
            )
        return _Home.apply(rows_RD, *handle.routes, handle.received_NL, self)

    def teardown(self) -> None:
        """Give the memory back; what autograd still holds goes with it."""
        if self._link is not None:
            self._link.memory.close()
        self._axis = self._spec = self._link = None

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
