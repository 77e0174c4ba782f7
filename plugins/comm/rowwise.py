"""Rows are written straight to where they belong on the process that has their expert; no process permutes them.

    dispatch: exchange counts -> barrier -> write each row to (process, row) of its expert -> barrier -> experts
    combine:  publish the experts' rows -> barrier -> read each token's rows from where they are, and add them

The backward pass of each is the other: the gradients of dispatched rows are read and added, those of combined tokens
are written to the rows. Where a row goes is computed from the counts of all processes, with operations on tensors: no
process asks for a value on the host. Only shapes, which the host knows anyway, are exchanged from host to host.

T tokens, K chosen experts, F further ones in the router's order, E experts of all processes, E_local of each,
N processes, D model width, C rows that fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from olmoe_lightning._torch import assert_async
from olmoe_lightning.errors import UserError
from olmoe_lightning.kernels import Dispatched
from olmoe_lightning.kernels.memory.cuda import CudaMemory, VirtualDeviceMemory, cuda_memory_missing
from olmoe_lightning.kernels.memory.posix import PosixMemory, posix_memory_missing
from olmoe_lightning.kernels.memory.symmetric import PeerError, SymmetricMemory
from olmoe_lightning.kernels.memory.virtual import VirtualRanks
from olmoe_lightning.kernels.routes import Routes
from olmoe_lightning.kernels.rowwise import count_routes, plan_routes
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.base import (
    CommPlugin,
    CommSpec,
    check_operands,
    check_same_sizes,
    check_setup,
    describe,
    named_exchange,
    not_set_up,
)
from olmoe_lightning.plugins.comm.capacity import Admitted, DropCounters, Overflow, admit
from olmoe_lightning.plugins.comm.leases import Layout, LeasePool
from olmoe_lightning.plugins.comm.link import Link, Metadata


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
        ctx.plugin, ctx.count = plugin, count
        with plugin.exchanging("rows"):
            return plugin.link.write(x_TD, weights_TK, Routes(rank_TK, row_TK), layout, buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_CD: Tensor, grad_weights_C: Tensor) -> tuple[Tensor | None, ...]:
        # Both are published whatever is needed here: other processes count on it. What a loss does not use is zero.
        rank_TK, row_TK, received = ctx.saved_tensors
        if ctx.count is not None:
            ctx.count()  # here, since the forward pass may be computed again
        with ctx.plugin.exchanging("gradients of rows"):
            grads = ctx.plugin.link.read(grad_CD, grad_weights_C, Routes(rank_TK, row_TK), received)
        return *grads, *[None] * 7


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_CD: Tensor, rank_TK: Tensor, row_TK: Tensor, received_NL: Tensor, plugin: RowwiseComm
    ) -> Tensor:
        ctx.save_for_backward(rank_TK, row_TK)
        ctx.plugin, ctx.capacity = plugin, len(rows_CD)
        with plugin.exchanging("rows on their way back"):
            return plugin.link.read(rows_CD, None, Routes(rank_TK, row_TK), received_NL)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        routes, link = Routes(*ctx.saved_tensors), ctx.plugin.link
        with ctx.plugin.exchanging("gradients on their way to the experts"):
            layout = Layout.of(grad_TD, ctx.capacity)
            grad_CD = link.write(grad_TD, None, routes, layout, link.pool.agree(layout.nbytes)).rows
        return grad_CD, None, None, None, None


class RowwiseComm(CommPlugin[_Handle]):
    """Every process writes into, and reads from, the memory of the others.

    Rows are received in buffers of fixed size. One is leased at each dispatch, until nothing reads its rows any more:
    after the backward pass, whenever that is. ``pool`` shows them; there are as many as are in flight at once.

    Args:
        capacity_factor: the capacity of a process is ``ceil(capacity_factor * T * K)`` rows, T being the most tokens
            that one of the processes dispatches. ``None``: all that could come, so that nothing is ever dropped.
        capacity_groups: G, equal groups of experts, each with its part of that capacity. Any number of processes drops
            the same routes of the same tokens when G is the same. ``None``: each process is a group.
        overflow: what becomes of the routes that do not fit. ``drop``: those with the smallest router weights are left
            out. ``spill``: they go to the next expert of their token's ranking whose group has capacity left, with the
            weight they have, and are left out when none of the next ``fallbacks`` has. ``error``: it is an error.
        fallbacks: F, experts that ``spill`` tries.
        seed: of the order of routes with equal weights.
        max_buffers: most receive buffers of a process; a dispatch that needs another one raises. ``None``: as many as
            are needed.

    Raises:
        UserError: an option is out of range.
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
        self._link: Link | None = None

    @classmethod
    @override
    def unavailable(cls, axis_size: int, device: torch.device) -> str | None:
        """It needs memory that all processes can map: of one host, or of GPUs that reach each other."""
        missing = {"cpu": posix_memory_missing, "cuda": cuda_memory_missing}.get(device.type)
        if missing is None:
            return f"its kernels for devices of type {device.type!r} do not exist, only those for cpu and cuda"
        return missing() if axis_size > 1 else None

    @override
    def setup(self, axis: Axis, spec: CommSpec) -> None:
        """Map the memory of the other processes; buffers are made by the first dispatches."""
        check_setup(self, axis, spec)
        try:
            memory = self._memory(axis, spec.device)
        except ValueError as error:
            raise UserError(f"comm {self.name!r} cannot serve {describe(axis)}: {error}") from error
        self.setup_on(memory, axis, spec)

    def _memory(self, axis: Axis, device: torch.device) -> SymmetricMemory:
        """The only place that chooses between kinds of memory."""
        cuda = device.type == "cuda"
        if axis.size == 1:
            single = VirtualRanks(1)
            return VirtualDeviceMemory(single, 0, device) if cuda else single.memory(0)
        assert axis.group is not None
        return CudaMemory(axis.group, device) if cuda else PosixMemory(axis.group)

    def setup_on(self, memory: SymmetricMemory, axis: Axis, spec: CommSpec) -> None:
        """As ``setup``, on memory that is there already."""
        check_same_sizes(self, axis, spec, memory.exchange(spec.sizes))
        if self.fallbacks > spec.num_experts - spec.top_k:
            raise UserError(
                f"comm {self.name!r}: fallbacks ({self.fallbacks}) are more than the experts that a token does not "
                f"choose (num_experts {spec.num_experts} - top_k {spec.top_k})"
            )
        groups = self._groups(axis)
        if groups % axis.size or spec.num_experts % groups:
            raise UserError(
                f"comm {self.name!r}: capacity_groups ({groups}) must be a multiple of the {axis.size} processes and a "
                f"divisor of the {spec.num_experts} experts: each process has whole groups of experts"
            )
        self._link = Link(memory, axis, spec, self.max_buffers)
        if self.capacity_factor is not None:
            self.drops = DropCounters(spec.num_experts, axis.size, spec.device)

    @property
    def link(self) -> Link:
        """Memory and buffers.

        Raises:
            RuntimeError: there was no ``setup``.
        """
        if self._link is None:
            raise not_set_up(self)
        return self._link

    @property
    def pool(self) -> LeasePool:
        """The receive buffers and their leases."""
        return self.link.pool

    @override
    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, fallback_ids_TF: Tensor | None = None
    ) -> Dispatched[_Handle]:
        """Write each token to its experts' rows, wherever they are.

        Args:
            x_TD: [T, D].
            expert_ids_TK: int64 [T, K], global ids.
            weights_TK: fp32 [T, K].
            fallback_ids_TF: int64 [T, F], the next experts of each token's ranking; needed when ``overflow`` is
                ``spill``, where F is ``fallbacks``.
        """
        link = self.link
        spec, axis = link.spec, link.axis
        check_operands(describe(axis), spec, x_TD, expert_ids_TK, weights_TK)
        if self.fallbacks and (fallback_ids_TF is None or fallback_ids_TF.shape != (len(x_TD), self.fallbacks)):
            found = None if fallback_ids_TF is None else tuple(fallback_ids_TF.shape)
            raise UserError(
                f"comm {self.name!r} on {describe(axis)}: overflow 'spill' needs fallback_ids_TF of shape "
                f"{(len(x_TD), self.fallbacks)}, got {found}"
            )
        with self.exchanging("counts"), torch.no_grad():
            tokens = [count for (count,) in link.memory.exchange([len(x_TD)])]  # shapes, which the host knows
            layout = Layout.of(x_TD, self._capacity(tokens))
            if self.capacity_factor is None:
                keep, count = None, None
                counts = count_routes(expert_ids_TK, None, spec.num_experts)
                metadata = link.exchange_metadata(counts, layout, [(spec.num_experts,)] * axis.size)
                counts_NE = torch.stack(metadata.tensors)
            else:
                metadata, admitted = self._admit(expert_ids_TK, weights_TK, fallback_ids_TF, tokens, layout)
                ids_by_rank, keep_by_rank = (each.split(tokens) for each in admitted)
                parts = zip(ids_by_rank, keep_by_rank, strict=True)
                counts_NE = torch.stack([count_routes(ids, kept, spec.num_experts) for ids, kept in parts])
                wanted, expert_ids_TK, keep = expert_ids_TK, ids_by_rank[axis.rank], keep_by_rank[axis.rank]
                assert self.drops is not None
                count = functools.partial(self.drops.add, wanted, expert_ids_TK, keep, weights_TK.detach())
            routes, received, ends = plan_routes(expert_ids_TK, keep, counts_NE, axis.rank)
        rows, row_weights = _ToExperts.apply(x_TD, weights_TK, *routes, received, self, layout, metadata.buffers, count)
        return Dispatched(rows, row_weights, ends, _Handle(routes, received, layout.capacity))

    def _capacity(self, tokens: list[int]) -> int:
        """Rows of a process' buffer: the capacity of its groups, and no more than there can be."""
        most = sum(tokens) * self.link.spec.top_k
        if self.capacity_factor is None:
            return most
        axis = self.link.axis
        return min(most, self._group_capacity(tokens) * (self._groups(axis) // axis.size))

    def _group_capacity(self, tokens: list[int]) -> int:
        """Rows that a group of experts may get."""
        assert self.capacity_factor is not None
        # Integers are multiplied first, so that axes of all sizes round alike.
        routes = max(tokens) * len(tokens) * self.link.spec.top_k
        return math.ceil(self.capacity_factor * routes / self._groups(self.link.axis))

    def _groups(self, axis: Axis) -> int:
        return self.capacity_groups or axis.size

    def _admit(
        self, ids_TK: Tensor, weights_TK: Tensor, fallback_ids_TF: Tensor | None, tokens: list[int], layout: Layout
    ) -> tuple[Metadata, Admitted]:
        """Show all processes the whole routing, and decide as they do."""
        spec, axis = self.link.spec, self.link.axis
        k, groups, capacity = spec.top_k, self._groups(axis), self._group_capacity(tokens)
        # One tensor: the weights' bits, the experts and the fallbacks, all of 32 bits.
        parts = [weights_TK.detach().float().contiguous().view(torch.int32), ids_TK.to(torch.int32)]
        if self.fallbacks:
            assert fallback_ids_TF is not None
            parts.append(fallback_ids_TF.to(torch.int32))
        own = torch.cat(parts, 1)
        metadata = self.link.exchange_metadata(own, layout, [(count, own.shape[1]) for count in tokens])
        everyone = torch.cat(metadata.tensors)
        weights = everyone[:, :k].contiguous().view(torch.float32)
        ids, fallback = everyone[:, k : 2 * k].long(), everyone[:, 2 * k :].long()
        admitted = admit(
            ids, weights, fallback if self.fallbacks else None, capacity, spec.num_experts, groups, self.seed
        )
        if self.overflow == "error":
            whom = "a process" if groups == axis.size else f"one of {groups} groups of experts"
            assert_async(
                admitted.keep_AK.all(),
                f"comm {self.name!r}: more routes go to {whom} than the {capacity} rows of its capacity "
                f"(capacity_factor {self.capacity_factor}, at most {max(tokens)} tokens of a process, top_k {k}); "
                "raise capacity_factor, or choose overflow 'drop' or 'spill'",
            )
        return metadata, admitted

    @override
    def combine(self, rows_RD: Tensor, handle: _Handle) -> Tensor:
        """Read each token's rows from where they are, and add them."""
        wanted = (handle.capacity, self.link.spec.d_model)
        if rows_RD.shape != wanted:
            raise UserError(
                f"combine on {describe(self.link.axis)}: rows of shape {wanted} expected, as they were dispatched, got "
                f"{tuple(rows_RD.shape)}"
            )
        return _FromExperts.apply(rows_RD, *handle.routes, handle.received_NL, self)

    @override
    def teardown(self) -> None:
        """Give the memory back; what autograd still holds goes with it."""
        if self._link is not None:
            self._link.memory.close()
        self._link = None

    def exchanging(self, what: str) -> AbstractContextManager[None]:
        """A context in which an exchange that fails says which one it was, and where."""
        return named_exchange(self.name, self.link.axis, what, PeerError)
