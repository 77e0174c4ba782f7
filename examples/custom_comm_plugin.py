"""A communication plugin of our own, and the proof that it is one.

python examples/custom_comm_plugin.py

Every process sees the tokens of all and serves the routes of its own experts; the results are summed. It needs nothing
but all-reduce, and it is wasteful: `all_to_all` sends a token only where it has to go. This is how one trains with it:
`MoEStrategy(expert_parallel_size=2, comm=GatherComm())`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from olmoe_lightning.kernels import Dispatched, LocalTransport
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins import CommPlugin, CommSpec
from olmoe_lightning.plugins.comm.conformance import ConformanceError, format_table, run_conformance


def gather(own: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    """[tokens of this process, ...] -> [tokens of all, ...]."""
    parts = list(own.new_zeros(sum(counts), *own.shape[1:]).split(counts))
    parts[axis.rank] = own
    return axis.all_reduce(torch.cat(parts))


def reduce(everyone: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    """The transpose of gather: the sum over the processes, of which each takes its own part."""
    return axis.all_reduce(everyone.clone()).split(counts)[axis.rank]


class Gather(torch.autograd.Function):
    """Tokens and weights in one node of the graph: each process reduces both gradients, whatever its loss reads."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, *place: Any) -> tuple[Tensor, Tensor]:
        """To all processes."""
        ctx.place = place
        return gather(x_TD, *place), gather(weights_TK, *place)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        """From all processes."""
        return reduce(grad_x, *ctx.place), reduce(grad_weights, *ctx.place), None, None


class Reduce(torch.autograd.Function):
    """The way home."""

    @staticmethod
    def forward(ctx: Any, everyone: Tensor, *place: Any) -> Tensor:
        """From all processes."""
        ctx.place = place
        return reduce(everyone, *place)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        """To all processes."""
        return gather(grad_TD, *ctx.place), None, None


class GatherComm(CommPlugin):
    """Tokens of all processes everywhere."""

    name = "gather"

    def setup(self, axis: Axis, spec: CommSpec) -> None:
        """Take the experts of this process, and one more for the routes whose experts are elsewhere."""
        if spec.num_experts % axis.size:
            raise ValueError(f"num_experts ({spec.num_experts}) must be divisible by the processes ({axis.size})")
        self.axis, self.experts = axis, spec.num_experts // axis.size
        self.local = LocalTransport(self.experts + 1)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Gather tokens, ids and weights; the rows of experts elsewhere stand behind the last end, as padding."""
        counts = torch.zeros(self.axis.size, dtype=torch.int64, device=x_TD.device)
        counts[self.axis.rank] = len(x_TD)
        place = self.axis, self.axis.all_reduce(counts).tolist()
        ids = gather(expert_ids_TK, *place) - self.axis.rank * self.experts
        ids = torch.where((ids >= 0) & (ids < self.experts), ids, self.experts)
        x, weights = Gather.apply(x_TD, weights_TK, *place)
        sent = self.local.dispatch(x, ids, weights)
        return Dispatched(sent.rows_RD, sent.row_weights_R, sent.offsets_E[:-1], (sent.handle, place))

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Sum the rows of each token here, then over the processes."""
        plan, place = handle
        return Reduce.apply(self.local.combine(rows_RD, plan), *place)

    def teardown(self) -> None:
        """There is nothing to give back."""


if __name__ == "__main__":
    try:
        print(format_table(run_conformance(GatherComm, processes=2)))
    except ConformanceError as error:
        raise SystemExit(str(error)) from None
