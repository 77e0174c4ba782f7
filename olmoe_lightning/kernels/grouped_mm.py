"""Grouped matrix product: each expert's rows times that expert's weight. The one seam for precision plugins.

R rows, E experts, N output width, K input width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from olmoe_lightning.kernels.autocast import cast_operands
from olmoe_lightning.kernels.choice import ROWS, on_gpu
from olmoe_lightning.kernels.needed import needed_grads, not_leaf


def grouped_mm(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """``y[r] = w[e] @ x[r]`` for the rows r of expert e, which are ``offsets[e-1] ... offsets[e]``.

    Rows from ``offsets[-1]`` on are padding: whatever they hold (NaN included) reaches neither result nor
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
    return _grouped_mm(x_RK, not_leaf(w_ENK), offsets_E.contiguous())


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
    served = _served_by(grad, x, offsets)
    if served != "loop":
        from olmoe_lightning.kernels.gpu import grouped_mm as gpu

        if served == "triton":
            return gpu.grad_w(grad, x, offsets)
        # An expert's sum ends with its rows, so that padding is not read. But an expert without rows has been seen to
        # get numbers that are not zero, on SM 10.
        return gpu.zero_empty_(F.grouped_mm(grad.t(), x, offs=offsets), offsets)
    grad_w = grad.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])
    sizes, _ = _sizes(offsets, x.shape[0])
    for grad_e, x_e, out_e in zip(grad.split(sizes), x.split(sizes), grad_w.unbind(0), strict=False):
        torch.mm(grad_e.t(), x_e, out=out_e)  # an empty product is zero
    return grad_w


def _product(x: Tensor, w_EKN: Tensor, offsets: Tensor) -> Tensor:
    """``x[r] @ w[e]``, tail rows zero."""
    served = _served_by(x, w_EKN, offsets)
    if served != "loop":
        from olmoe_lightning.kernels.gpu import grouped_mm as gpu

        if served == "triton":
            return gpu.product(x, w_EKN, offsets)
        return gpu.zero_tail_(F.grouped_mm(x, w_EKN, offs=offsets), offsets)  # it leaves them uninitialised
    out = x.new_empty(x.shape[0], w_EKN.shape[2])
    sizes, tail = _sizes(offsets, x.shape[0])
    *out_e, out_tail = out.split(sizes)
    for x_e, w_e, o_e in zip(x.split(sizes), w_EKN.unbind(0), out_e, strict=False):
        torch.mm(x_e, w_e, out=o_e)
    if tail:
        out_tail.zero_()
    return out


def _served_by(a: Tensor, b: Tensor, offsets: Tensor) -> Literal["loop", "library", "triton"]:
    """The one place of choice: a loop over the experts, ``F.grouped_mm``, or our own kernels."""
    if not on_gpu(a, b, offsets) or a.dtype not in ROWS:
        return "loop"
    if a.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(a.device)
        if library_serves(capability, a, b, offsets.shape[0]):
            return "library"
    return "triton"


def library_serves(capability: tuple[int, int], a: Tensor, b: Tensor, experts: int) -> bool:
    """Whether ``F.grouped_mm``, as of torch 2.13, multiplies these on a CUDA device without a copy to the host.

    It does in bf16 for fewer than 1024 experts, on devices of compute capability 9.x and 10.x. For other dtypes and
    devices it copies the offsets to the host and loops over the experts. It refuses matrices that do not begin, with
    their rows, at multiples of 16 bytes, and pads the rows of a result to that. A matrix [R, ...] whose columns are
    dense instead of its rows stops the device, unless all experts have a multiple of 8 rows.

    Args:
        capability: of the device.
        a: rows [R, K], or gradients of the result [R, N].
        b: weights [E, K, N], in memory as they are or transposed; or rows [R, K], for the gradient of the weights.
        experts: E.
    """
    return (
        capability[0] in (9, 10)
        and a.dtype == torch.bfloat16
        and 0 < experts < 1024
        and b.shape[-1] * b.itemsize % 16 == 0
        and all(_rows_at_16_bytes(each) for each in (a, b))
    )


def _rows_at_16_bytes(matrix: Tensor) -> bool:
    *outer, row, column = matrix.stride()
    if outer and row == 1:
        matrix, row, column = matrix.mT, column, row
    return (
        matrix.numel() > 0
        and column == 1
        and row >= matrix.shape[-1]
        and all(stride * matrix.itemsize % 16 == 0 for stride in (*outer, row))
        and matrix.data_ptr() % 16 == 0
    )


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
