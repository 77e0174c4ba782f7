"""The experts' two products around SwiGLU.

R rows sorted by expert, E experts, D model width, H hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from olmoe_lightning.kernels.autocast import cast_operands
from olmoe_lightning.kernels.choice import on_cpu
from olmoe_lightning.kernels.cpu.native import call, threads
from olmoe_lightning.kernels.grouped_mm import grouped_mm
from olmoe_lightning.kernels.needed import needed_grads, not_leaf
from olmoe_lightning.kernels.swiglu import swiglu


def expert_mlp(rows_RD: Tensor, w_gate_up: Tensor, w_down: Tensor, row_weights_R: Tensor, offsets_E: Tensor) -> Tensor:
    """``w_down[e] @ (weight * swiglu(w_gate_up[e] @ row))`` for each row of expert e.

    Args:
        rows_RD: [R, D]; rows from ``offsets[-1]`` on are padding, give zero and get no gradient.
        w_gate_up: [E, 2H, D], gate rows first.
        w_down: [E, D, H].
        row_weights_R: fp32 [R].
        offsets_E: int32 [E], non-decreasing ends of the experts' rows.

    Returns:
        [R, D].

    Raises:
        ValueError: shapes or dtypes do not fit together; the message has them.
    """
    (experts, width, inner), rows = w_down.shape, len(rows_RD)
    wanted = ([rows, width], [experts, 2 * inner, width], [rows], [experts])
    found = tuple(list(tensor.shape) for tensor in (rows_RD, w_gate_up, row_weights_R, offsets_E))
    if found != wanted or offsets_E.dtype != torch.int32:
        raise ValueError(
            f"expert_mlp with w_down {list(w_down.shape)} needs rows, w_gate_up, row weights and int32 offsets of "
            f"shapes {wanted}, got {found} and {offsets_E.dtype}"
        )
    rows_RD, w_gate_up, w_down = cast_operands(rows_RD, w_gate_up, w_down)
    if on_cpu(rows_RD, w_gate_up, w_down, row_weights_R) and _spread(offsets_E, rows):
        return _ExpertMLP.apply(rows_RD, not_leaf(w_gate_up), not_leaf(w_down), row_weights_R, offsets_E)
    hidden = swiglu(grouped_mm(rows_RD, w_gate_up, offsets_E), row_weights_R)
    return grouped_mm(hidden, w_down, offsets_E)


def _spread(offsets_E: Tensor, rows: int) -> bool:
    """Whether one thread per expert keeps all threads busy: no expert has much more than a thread's share of rows."""
    ends = offsets_E.tolist()
    largest = max((end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)), default=0)
    return ends[-1] <= rows and largest * torch.get_num_threads() <= 1.25 * max(ends[-1], 1)


def _copy_from_shared(rows: Tensor, offsets_E: Tensor) -> Tensor:
    """Rows in memory that is shared with other processes are copied to torch's own; others are returned as they are.

    Shared memory has small pages, and a product reads each row many times. Each time the processor translates the
    address of its page again: forward and backward of the experts took a third longer.
    """
    if rows.untyped_storage().resizable():
        return rows
    copy, count = torch.empty_like(rows), int(offsets_E[-1])
    copy[:count].copy_(rows[:count])
    return copy


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, w_gate_up: Tensor, w_down: Tensor, row_weights: Tensor, offsets: Tensor
    ) -> Tensor:
        rows, row_weights = _copy_from_shared(rows.contiguous(), offsets), row_weights.contiguous()
        w_gate_up, w_down = w_gate_up.contiguous(), w_down.contiguous()
        experts, width, hidden = w_down.shape
        gate_up, y = rows.new_empty(len(rows), 2 * hidden), torch.empty_like(rows)
        inputs = (rows, w_gate_up, w_down, row_weights, offsets)
        call("experts_forward", *inputs, len(rows), experts, width, hidden, gate_up, y, threads())
        ctx.save_for_backward(rows, w_gate_up, w_down, row_weights, offsets, gate_up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, w_gate_up, w_down, row_weights, offsets, gate_up = ctx.saved_tensors
        grad = _copy_from_shared(grad.contiguous(), offsets)
        needed = needed_grads(ctx, 4)
        inputs = (rows, w_gate_up, w_down, row_weights)
        grads = [torch.empty_like(each) if need else None for each, need in zip(inputs, needed, strict=True)]
        call("experts_backward", grad, *inputs, gate_up, offsets, len(rows), *w_down.shape, *grads, threads())
        return (*grads, None)
