"""Tokens travel by all-to-all over gloo or NCCL; none is dropped, whatever the load.

    tokens [T, D] --gather--> sorted by global expert --all-to-all--> by (source, local expert) --regroup--> by expert

Experts of one process are neighbours, so that rows sorted by expert are sorted by destination too. What arrives is
sorted by expert within each source; putting the blocks of one expert side by side is a copy of whole blocks, and
needless where a process has one expert. The way back is the same in reverse, and so are the gradients of both.

T tokens, K chosen experts, E experts of all processes, E_local of each, N processes, D model width, R rows received.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from olmoe_lightning.errors import UserError
from olmoe_lightning.kernels import Dispatched, Permutation, combine_rows, dispatch_rows, plan_permutation
from olmoe_lightning.parallel import Axis
from olmoe_lightning.parallel.collectives import Pending, all_gather, all_to_all
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


class _Route:
    """How many rows go where in one dispatch. The exchange of these numbers begins here and ends in :meth:`resolve`."""

    def __init__(self, axis: Axis, offsets_E: Tensor, experts_local: int) -> None:
        self.axis = axis
        self._sent_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
        self._received_NE = offsets_E.new_empty(axis.size, experts_local)
        equal = [experts_local] * axis.size
        self._pending = all_to_all(axis, self._received_NE.view(-1), self._sent_E, equal, equal)

    def resolve(self) -> Tensor:
        """Wait for the numbers and bring them to the host, in one copy; int32 ends of the local experts' rows."""
        _wait(self.axis, self._pending, "counts")
        size, experts = self._received_NE.shape
        # per process what goes there, then per (process, local expert) what comes from there
        numbers = torch.cat([self._sent_E.view(size, experts).sum(1, dtype=torch.int32), self._received_NE.view(-1)])
        host = _to_host(numbers)
        self.sent, self.blocks = host[:size], host[size:]
        self.received = [sum(self.blocks[i * experts : (i + 1) * experts]) for i in range(size)]
        self.regroups = size > 1 and experts > 1
        # position of block (source, expert) when sorted by expert
        self._by_expert = [source * experts + expert for expert in range(experts) for source in range(size)]
        return self._received_NE.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def by_expert(self, arrived: Tensor) -> Tensor:
        """Put the blocks of each expert side by side; [R, ...]."""
        if not self.regroups:
            return arrived
        blocks = arrived.split(self.blocks)
        return torch.cat([blocks[i] for i in self._by_expert])

    def by_source(self, rows: Tensor) -> Tensor:
        """The inverse: as they arrived."""
        if not self.regroups:
            return rows.contiguous()
        split = rows.split([self.blocks[i] for i in self._by_expert])
        blocks: list[Tensor] = [rows] * len(split)
        for i, block in zip(self._by_expert, split, strict=True):
            blocks[i] = block
        return torch.cat(blocks)

    def send(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Start the exchange to the experts."""
        if self.axis.size == 1:
            return tensor, Pending()
        output = tensor.new_empty(sum(self.received), *tensor.shape[1:])
        return output, all_to_all(self.axis, output, tensor, self.received, self.sent)

    def send_back(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Start the exchange back to the tokens' processes."""
        if self.axis.size == 1:
            return tensor, Pending()
        output = tensor.new_empty(sum(self.sent), *tensor.shape[1:])
        return output, all_to_all(self.axis, output, tensor, self.sent, self.received)


class _Handle(NamedTuple):
    plan: Permutation
    route: _Route


class _ToExperts(torch.autograd.Function):
    """Rows sorted by destination and the weights of all routes -> rows and weights by local expert, and their ends."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights_TK: Tensor, plan: Permutation, route: _Route
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.plan, ctx.route = plan, route
        row_weights = weights_TK.reshape(-1).index_select(0, plan.route_of_row_R)
        offsets = route.resolve()
        # The weights travel while the rows do.
        arrived, rows_pending = route.send(rows)
        arrived_weights, weights_pending = route.send(row_weights)
        _wait(route.axis, rows_pending, "rows")
        arrived = route.by_expert(arrived)
        _wait(route.axis, weights_pending, "row weights")
        ctx.mark_non_differentiable(offsets)
        return arrived, route.by_expert(arrived_weights), offsets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: None) -> tuple[Tensor | None, ...]:
        # Both are sent whatever is needed here: other processes count on it. What a loss does not use comes as zeros.
        plan, route = ctx.plan, ctx.route
        sent_back, rows_pending = route.send_back(route.by_source(grad_rows))
        sent_back_weights, weights_pending = route.send_back(route.by_source(grad_weights))
        _wait(route.axis, weights_pending, "gradients of row weights")
        order = plan.row_of_route_TK
        grad_weights_TK = sent_back_weights.index_select(0, order.reshape(-1)).view_as(order)
        _wait(route.axis, rows_pending, "gradients of rows")
        return sent_back, grad_weights_TK, None, None


class _FromExperts(torch.autograd.Function):
    """The experts' rows -> rows in the order in which tokens were sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        arrived, pending = route.send_back(route.by_source(rows))
        _wait(route.axis, pending, "rows on their way back")
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        route = ctx.route
        arrived, pending = route.send(grad.contiguous())
        _wait(route.axis, pending, "gradients on their way to the experts")
        return route.by_expert(arrived), None


class AllToAllComm(CommPlugin[_Handle]):
    """Counts first, then rows and weights. Gloo on CPUs, NCCL on CUDA, with the same code.

    A dispatch copies the counts to the host once and waits for them there; everything else is queued. Memory is what
    the rows need: a process that all tokens choose receives them all.
    """

    name: ClassVar[str] = "all_to_all"

    def __init__(self) -> None:
        self._axis: Axis | None = None
        self._spec: CommSpec | None = None
        self._experts_local = 0

    @classmethod
    @override
    def unavailable(cls, axis_size: int, device: torch.device) -> str | None:
        """It needs torch.distributed with gloo for the CPU or NCCL for CUDA."""
        if axis_size == 1:
            return None
        if not dist.is_available():
            return "this build of torch has no torch.distributed"
        present = {"cpu": dist.is_gloo_available, "cuda": dist.is_nccl_available}.get(device.type)
        if present is None:
            return f"there is no all-to-all for devices of type {device.type!r}, only for cpu (gloo) and cuda (NCCL)"
        if not present():
            return f"this build of torch has no {'gloo' if device.type == 'cpu' else 'NCCL'}"
        return None

    @override
    def setup(self, axis: Axis, spec: CommSpec) -> None:
        """Check that all processes mean the same; nothing large is made."""
        experts_local = check_setup(self, axis, spec)
        if axis.size > 1:
            backend = dist.get_backend(axis.group)
            if spec.device.type == "cuda" and backend == "gloo":
                raise UserError(
                    f"comm {self.name!r} on {describe(axis)}: rows are on {spec.device}, but the process group is of "
                    f"backend {backend!r}; start it with 'nccl'"
                )
            sizes = torch.zeros(axis.size, len(spec.sizes), dtype=torch.int64, device=spec.device)
            sizes[axis.rank] = torch.tensor(spec.sizes)
            all_gather(axis, sizes.view(-1)).wait()
            check_same_sizes(self, axis, spec, [tuple(row) for row in sizes.tolist()])
        self._axis, self._spec, self._experts_local = axis, spec, experts_local

    @override
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched[_Handle]:
        """Send each token to its experts, wherever they are."""
        if self._axis is None or self._spec is None:
            raise not_set_up(self)
        check_operands(describe(self._axis), self._spec, x_TD, expert_ids_TK, weights_TK)
        plan = plan_permutation(expert_ids_TK, self._spec.num_experts)
        route = _Route(self._axis, plan.offsets_E, self._experts_local)
        # The rows are gathered while the counts travel.
        arrived, row_weights, offsets = _ToExperts.apply(dispatch_rows(x_TD, plan), weights_TK, plan, route)
        return Dispatched(arrived, row_weights, offsets, _Handle(plan, route))

    @override
    def combine(self, rows_RD: Tensor, handle: _Handle) -> Tensor:
        """Bring the rows back and sum them per token."""
        return combine_rows(_FromExperts.apply(rows_RD, handle.route), handle.plan)

    @override
    def teardown(self) -> None:
        """Forget the axis."""
        self._axis = self._spec = None


def _to_host(numbers: Tensor) -> list[int]:
    """One copy, and one wait for it."""
    if numbers.device.type != "cuda":
        return numbers.tolist()
    host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    torch.cuda.current_stream(numbers.device).synchronize()  # what a non-blocking copy brings may not be read before
    return host.tolist()


def _wait(axis: Axis, pending: Pending, what: str) -> None:
    with named_exchange(AllToAllComm.name, axis, what):
        pending.wait()
