"""Grouped matrix product: each expert's rows times that expert's weight. The one seam for precision plugins.

R rows, E experts, N output width, K input width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olmoe_lightning.kernels.autocast import cast_operands
from olmoe_lightning.kernels.needed import needed_grads, not_leaf


def grouped_mm(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """``y[r] = w[e] @ x[r]`` for the rows r of expert e, which are ``offsets[e-1] ... offsets[e]``.

    Rows from ``offsets[-1]`` on belong to nobody: whatever they hold (NaN included) reaches neither result nor
    gradients, and the result is zero there. An expert without rows gets a zero gradient, not ``None``.

    Args:
        x_RK: [R, K], rows sorted by expert.
        w_ENK: [E, N, K], same dtype.
        offsets_E: int32 [E], non-decreasing ends of the experts' rows, on the same device.

    Returns:
        [R, N].

    Raises:
        ValueError: shapes or dtypes do not fit together; the message has both.
    """
    if x_RK.ndim != 2 or w_ENK.ndim != 3 or x_RK.shape[1] != w_ENK.shape[2]:
        raise ValueError(f"grouped_mm needs x [R, K] and w [E, N, K], got {_shape(x_RK)} and {_shape(w_ENK)}")
    if offsets_E.dtype != torch.int32 or offsets_E.shape != w_ENK.shape[:1]:
        raise ValueError(
            f"grouped_mm needs int32 offsets of shape [{w_ENK.shape[0]}] (one end per expert), "
            f"got {offsets_E.dtype} {_shape(offsets_E)}"
        )
    x_RK, w_ENK = cast_operands(x_RK, w_ENK)
    if x_RK.dtype != w_ENK.dtype:
        raise ValueError(f"grouped_mm needs one dtype, got x {x_RK.dtype} and w {w_ENK.dtype}")
    return _grouped_mm(x_RK, not_leaf(w_ENK), offsets_E)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


@torch.library.custom_op("olmoe_lightning::grouped_mm", mutates_args=())
def _grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return _product(x, w.transpose(1, 2), offsets)


@torch.library.custom_op("olmoe_lightning::grouped_mm_grad_x", mutates_args=())
def _grouped_mm_grad_x(grad: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return _product(grad, w, offsets)


@torch.library.custom_op("olmoe_lightning::grouped_mm_grad_w", mutates_args=())
def _grouped_mm_grad_w(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return F.grouped_mm(grad.t(), x, offs=offsets)
    grad_w = grad.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])
    sizes, _ = _sizes(offsets, x.shape[0])
    for grad_e, x_e, out_e in zip(grad.split(sizes), x.split(sizes), grad_w.unbind(0), strict=False):
        torch.mm(grad_e.t(), x_e, out=out_e)  # an empty product is zero
    return grad_w


def _product(x: Tensor, w_EKN: Tensor, offsets: Tensor) -> Tensor:
    """``x[r] @ w[e]``, tail rows zero."""
    if x.device.type != "cpu":
        out = F.grouped_mm(x, w_EKN, offs=offsets)
        # The library leaves tail rows uninitialised; the comparison stays on the device.
        rows = torch.arange(x.shape[0], device=x.device)
        return out.masked_fill_((rows >= offsets[-1])[:, None], 0.0)
    out = x.new_empty(x.shape[0], w_EKN.shape[2])
    sizes, tail = _sizes(offsets, x.shape[0])
    *out_e, out_tail = out.split(sizes)
    for x_e, w_e, o_e in zip(x.split(sizes), w_EKN.unbind(0), out_e, strict=False):
        torch.mm(x_e, w_e, out=o_e)
    if tail:
        out_tail.zero_()
    return out


def _sizes(offsets: Tensor, rows: int) -> tuple[list[int], int]:
    """Rows of each expert and, last, of the tail."""
    ends = offsets.tolist()
    if ends and ends[-1] > rows:
        raise ValueError(f"offsets end at row {ends[-1]}, but there are {rows} rows")
    starts = [0, *ends[:-1]]
    tail = rows - (ends[-1] if ends else 0)
    return [end - start for start, end in zip(starts, ends, strict=True)] + [tail], tail


@_grouped_mm.register_fake
def _(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@_grouped_mm_grad_x.register_fake
def _(grad: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], w.shape[2])


@_grouped_mm_grad_w.register_fake
def _(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    need_x, need_w = needed_grads(ctx, 2)
    grad_x = _grouped_mm_grad_x(grad, w, offsets) if need_x else None
    grad_w = _grouped_mm_grad_w(grad, x, offsets) if need_w else None
    return grad_x, grad_w, None


_grouped_mm.register_autograd(_backward, setup_context=_save)
