"""Every kernel against PyTorch, with gradients, through the functions that the package itself calls.

Experts get nothing, one row or many, routes are dropped, widths fill no block, and padding is NaN.

T tokens, K chosen experts, E experts, N processes, D model width, H expert width, C rows that fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from olmoe_lightning.kernels import (
    combine_rows,
    dispatch_rows,
    expert_mlp,
    grouped_mm,
    plan_permutation,
    reference_kernels,
    rowwise,
    swiglu,
)
from olmoe_lightning.kernels.routes import Window

DTYPES = (torch.bfloat16, torch.float32)
ROUNDED = {torch.bfloat16: 2**-6, torch.float32: 1e-5}
"""Of the largest value. Both sides have the 8 bits of bf16, rounded, or cut off by Triton's interpreter; in fp32, a
thousand terms are added in another order."""
PROCESSES = 2

Outcome = tuple[list[Tensor], list[Tensor], float]
"""What was computed, what should have been, and how far apart they may be."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name: of what is checked.
        compute: both sides.
    """

    name: str
    compute: Callable[[], Outcome]


@dataclass(frozen=True)
class Sizes:
    """Of the operands."""

    tokens: int
    k: int
    experts: int
    width: int
    hidden: int


LARGE = Sizes(tokens=1000, k=8, experts=64, width=1032, hidden=520)
TINY = Sizes(tokens=12, k=2, experts=4, width=24, hidden=8)
"""For Triton's interpreter."""


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest one, over the largest value that is wanted; infinite for another shape or dtype, or for NaN."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if torch.equal(found, wanted):
        return 0.0
    scale = wanted.double().abs().max().clamp_min(1e-30)
    apart = float((found.double() - wanted.double()).abs().max() / scale)
    return apart if apart == apart else float("inf")


class Checks:
    """The checks of one device.

    Args:
        device: where the operands lie.
        sizes: of them.
        triton: whether Triton's kernels can run there.
    """

    def __init__(self, device: torch.device, sizes: Sizes, triton: bool) -> None:
        self.device, self.sizes, self.triton = device, sizes, triton
        self._generator = torch.Generator(device).manual_seed(0)

    def all(self) -> Iterator[Check]:
        """Everything, by dtype."""
        for dtype in DTYPES:
            kind = str(dtype).removeprefix("torch.")
            works: dict[str, Callable[[torch.dtype], Outcome]] = {
                "grouped_mm": lambda dtype: self.grouped_mm(dtype, grouped_mm),
                "swiglu": self.swiglu,
                "expert_mlp": self.expert_mlp,
                "dispatch_rows, combine_rows": self.permutation,
                f"rowwise, memory of {PROCESSES}": self.rowwise,
            }
            if self.triton:
                works["grouped_mm in Triton"] = lambda dtype: self.grouped_mm(dtype, triton_grouped_mm)
            for name, work in works.items():
                yield Check(f"{name}, {kind}", functools.partial(work, dtype))

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values."""
        return torch.randn(*shape, device=self.device, generator=self._generator).to(dtype)

    def grouped_mm(self, dtype: torch.dtype, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Outcome:
        """Rows behind the last expert's are NaN on the way in and must be zero on the way out."""
        s, rows = self.sizes, self.sizes.tokens
        x, w = self.randn(rows + 5, s.width, dtype=dtype), self.randn(s.experts, s.hidden, s.width, dtype=dtype)
        offsets, grad = self._ends(rows), self.randn(rows + 5, s.hidden, dtype=dtype)
        x[rows:] = grad[rows:] = float("nan")
        found = _with_grads(lambda a, b: function(a, b, offsets), (x, w), grad)
        padding = torch.arange(rows + 5, device=self.device)[:, None] >= rows
        x, grad = x.masked_fill(padding, 0.0), grad.masked_fill(padding, 0.0)
        wanted = _with_grads(lambda a, b: loop(a, b, offsets), (x.float(), w.float()), grad.float())
        return found, [each.to(dtype) for each in wanted], ROUNDED[dtype]

    def swiglu(self, dtype: torch.dtype) -> Outcome:
        """With row weights, which have a gradient too."""
        s = self.sizes
        gate_up, weights = self.randn(s.tokens, 2 * s.hidden, dtype=dtype), self.randn(s.tokens).abs()
        grad = self.randn(s.tokens, s.hidden, dtype=dtype)
        found = _with_grads(swiglu, (gate_up, weights), grad)
        wanted = _with_grads(plain_swiglu, (gate_up.float(), weights), grad.float())
        return found, [*(each.to(dtype) for each in wanted[:2]), wanted[2]], ROUNDED[dtype]

    def expert_mlp(self, dtype: torch.dtype) -> Outcome:
        """Two products around SwiGLU."""
        s, rows = self.sizes, self.sizes.tokens
        x, weights = self.randn(rows, s.width, dtype=dtype), self.randn(rows).abs()
        w_gate_up = (self.randn(s.experts, 2 * s.hidden, s.width) / s.width**0.5).to(dtype)
        w_down = (self.randn(s.experts, s.width, s.hidden) / s.hidden**0.5).to(dtype)
        offsets, grad = self._ends(rows), self.randn(rows, s.width, dtype=dtype)

        def plain(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor) -> Tensor:
            return loop(plain_swiglu(loop(x, w_gate_up, offsets), weights), w_down, offsets)

        operands = (x, w_gate_up, w_down, weights)
        found = _with_grads(lambda a, b, c, d: expert_mlp(a, b, c, d, offsets), operands, grad)
        wanted = _with_grads(plain, tuple(each.float() for each in operands), grad.float())
        # What stands between the products is rounded too.
        return found, [*(each.to(dtype) for each in wanted[:4]), wanted[4]], 3 * ROUNDED[dtype]

    def permutation(self, dtype: torch.dtype) -> Outcome:
        """The plan, and both movements with their gradients."""
        s, ids = self.sizes, self._ids()
        x, rows = self.randn(s.tokens, s.width, dtype=dtype), self.randn(ids.numel(), s.width, dtype=dtype)
        plan = plan_permutation(ids, s.experts)
        sent = _with_grads(lambda each: dispatch_rows(each, plan), (x,), rows)
        home = _with_grads(lambda each: combine_rows(each, plan), (rows,), x)
        with reference_kernels():
            right = plan_permutation(ids, s.experts)
            gathered, summed = dispatch_rows(x, right), combine_rows(rows, right)
        # The way back of each is the other: gradients are what the other one gives. Nothing is differentiated here,
        # since on GPUs another thread would do that, which knows nothing of the line above.
        return [*plan, *sent, *home], [*right, gathered, summed, summed, gathered], ROUNDED[dtype]

    def rowwise(self, dtype: torch.dtype) -> Outcome:
        """A dispatch and a combine of one process; the memory of its peers is on this device too."""
        s, ids = self.sizes, self._ids()
        keep = torch.rand(ids.shape, device=self.device, generator=self._generator) > 0.2
        x, weights = self.randn(s.tokens, s.width, dtype=dtype), self.randn(*ids.shape).abs()
        capacity = PROCESSES * ids.numel()
        rows = [self.randn(capacity, s.width, dtype=dtype) for _ in range(PROCESSES)]
        beside = [self.randn(capacity) for _ in range(PROCESSES)]

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

        def run() -> list[Tensor]:
            mine = rowwise.count_routes(ids, keep, s.experts)
            counts = torch.stack([mine] * PROCESSES)
            routes, received, ends = rowwise.plan_routes(ids, keep, counts, rank=1)
            windows = [Window(empty(capacity + 1, s.width, dtype=dtype), empty(capacity + 1)) for _ in rows]
            rowwise.put_rows(x, weights, routes, windows)
            arrived = [part[:capacity].nan_to_num(-7.0) for window in windows for part in window]
            # What this process sent to itself need not be published, so that the place itself is not compared.
            own = rowwise.publish_rows(rows[1], beside[1], received, 1, windows[1])
            kept, sent_to_itself = windows[1].rows[: int(ends[-1])], torch.zeros_like(own[: int(ends[-1]), 0]).bool()
            end = 0
            for to_expert in received.t().tolist():  # of each process, in their order
                sent_to_itself[end + to_expert[0] : end + sum(to_expert[:2])] = True
                end += sum(to_expert)
            published = kept.masked_fill(sent_to_itself[:, None], 0.0)
            summed = rowwise.sum_rows([rows[0], own], routes)
            weighted = rowwise.sum_rows([rows[0], own], routes, weights)
            numbers = rowwise.gather_weights(beside, routes)
            return [mine, *routes, received, ends, *arrived, published, summed, weighted, numbers]

        found = run()
        with reference_kernels():
            wanted = run()
        return found, wanted, ROUNDED[dtype]

    def _ends(self, rows: int) -> Tensor:
        """int32 ends of experts' rows: the first has none, the second one row, the third half of them."""
        sizes = [0, 1, rows // 2]
        more = self.sizes.experts - len(sizes)
        sizes += [(rows - sum(sizes)) // more] * (more - 1)
        return torch.tensor([*sizes, rows - sum(sizes)]).cumsum(0).to(self.device, torch.int32)

    def _ids(self) -> Tensor:
        """int64 [T, K]; no token chooses the last expert."""
        s = self.sizes
        scores = torch.rand(s.tokens, s.experts - 1, device=self.device, generator=self._generator)
        return scores.topk(s.k).indices


def loop(x: Tensor, w_ENK: Tensor, offsets: Tensor) -> Tensor:
    """A product per expert; rows behind the last one's are zero."""
    ends = offsets.tolist()
    pieces = [x[start:end] @ w.t() for start, end, w in zip([0, *ends[:-1]], ends, w_ENK, strict=True)]
    return torch.cat([*pieces, x.new_zeros(len(x) - ends[-1], w_ENK.shape[1])])


def plain_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """As a model would write it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up * weights.to(gate.dtype)[:, None]


class _TritonGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        from olmoe_lightning.kernels.gpu import grouped_mm as triton

        ctx.save_for_backward(x, w, offsets)
        return triton.product(x, w.transpose(1, 2), offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        from olmoe_lightning.kernels.gpu import grouped_mm as triton

        x, w, offsets = ctx.saved_tensors
        return triton.product(grad, w, offsets), triton.grad_w(grad, x, offsets), None


def triton_grouped_mm(x: Tensor, w_ENK: Tensor, offsets: Tensor) -> Tensor:
    """The Triton kernels also where the package takes torch's own."""
    return _TritonGroupedMM.apply(x, w_ENK, offsets)


def _with_grads(function: Callable[..., Tensor], operands: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    """The result, and the gradients of all operands."""
    leaves = [each.detach().clone().requires_grad_() for each in operands]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
