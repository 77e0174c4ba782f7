"""Triton: SwiGLU with the router's weight folded in, one pass forward and one backward.

R rows, H hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmoe_lightning.kernels.gpu.compile_case import CompileCase
from olmoe_lightning.kernels.gpu.rows import side_by_side

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of what the kernels read and write. They compute in fp32."""


@triton.jit(do_not_specialize=["R"])
def _forward_kernel(
    gate_up, weights, out, R, H, gate_up_stride,
    WEIGHTED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (rows < R)[:, None] & (columns < H)[None, :]
    gate_at = gate_up + rows.to(tl.int64)[:, None] * gate_up_stride + columns[None, :]
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + H, mask=inside, other=0.0).to(tl.float32)
    hidden = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        hidden *= tl.load(weights + rows, mask=rows < R, other=0.0)[:, None]
    out_at = out + rows.to(tl.int64)[:, None] * H + columns[None, :]
    tl.store(out_at, hidden.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _backward_kernel(
    grad, gate_up, weights, grad_gate_up, grad_weights, R, H, grad_stride, gate_up_stride,
    WEIGHTED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = rows < R
    long = rows.to(tl.int64)[:, None]
    # One program has whole rows, so that each sum has one order.
    sums = tl.zeros((BLOCK_R, BLOCK_H), tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + rows, mask=real, other=0.0)[:, None]
    for column in range(0, H, BLOCK_H):
        columns = column + tl.arange(0, BLOCK_H)
        inside = real[:, None] & (columns < H)[None, :]
        gate_at = gate_up + long * gate_up_stride + columns[None, :]
        gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_at + H, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + long * grad_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if WEIGHTED:
            sums += g * silu * up
            g *= weight
        out_at = grad_gate_up + long * (2 * H) + columns[None, :]
        grad_gate = g * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(out_at, grad_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
        tl.store(out_at + H, (g * silu).to(grad_gate_up.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + rows, tl.sum(sums, 1), mask=real)


def serves(gate_up: Tensor, row_weights: Tensor | None) -> bool:
    """Whether the kernels take these dtypes."""
    return gate_up.dtype in DTYPES and (row_weights is None or row_weights.dtype == torch.float32)


def forward(gate_up: Tensor, row_weights: Tensor | None) -> Tensor:
    """``silu(gate) * up``, each row times its weight.

    Args:
        gate_up: [..., 2H], gate columns first; [R, 2H] when there are weights.
        row_weights: fp32 [R] or ``None``.

    Returns:
        [..., H].
    """
    hidden = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], hidden)
    if out.numel():
        flat, (height, width, warps) = _rows(gate_up), _cut(hidden)
        grid = (triton.cdiv(len(flat), height), triton.cdiv(hidden, width))
        with torch.cuda.device_of(flat):
            _forward_kernel[grid](
                flat, None if row_weights is None else row_weights.contiguous(), out, len(flat), hidden, flat.stride(0),
                WEIGHTED=row_weights is not None, BLOCK_R=height, BLOCK_H=width, num_warps=warps,
            )  # fmt: skip
    return out


def backward(grad: Tensor, gate_up: Tensor, row_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``gate_up`` and of the weights.

    Args:
        grad: [..., H], of the result.
        gate_up: as in :func:`forward`.
        row_weights: as in :func:`forward`.
    """
    grad_gate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    if not grad_gate_up.numel():
        return grad_gate_up, None if row_weights is None else torch.zeros_like(row_weights)
    weights = None if row_weights is None else row_weights.contiguous()
    grad_weights = None if weights is None else torch.empty_like(weights)
    flat, grad, hidden = _rows(gate_up), _rows(grad), gate_up.shape[-1] // 2
    height, width, warps = _cut(hidden)
    with torch.cuda.device_of(flat):
        _backward_kernel[(triton.cdiv(len(flat), height),)](
            grad, flat, weights, grad_gate_up, grad_weights, len(flat), hidden, grad.stride(0), flat.stride(0),
            WEIGHTED=weights is not None, BLOCK_R=height, BLOCK_H=width, num_warps=warps,
        )  # fmt: skip
    return grad_gate_up, grad_weights


def _rows(tensor: Tensor) -> Tensor:
    return side_by_side(tensor.reshape(-1, tensor.shape[-1]))


def _cut(hidden: int) -> tuple[int, int, int]:
    """Rows and columns of a block, and warps for it: eight values of a thread, so that 16 bytes are moved at once."""
    width = min(triton.next_power_of_2(hidden), 1024)
    return 2048 // width, width, 8


def _compile_case(name: str, kernel: Any, dtype: str, weighted: bool) -> CompileCase:
    height, width, warps = _cut(1024)
    constants: dict[str, Any] = {"WEIGHTED": weighted, "BLOCK_R": height, "BLOCK_H": width}
    if not weighted:
        constants |= {each: None for each in ("weights", "grad_weights") if each in kernel.arg_names}
    types = dict.fromkeys(("gate_up", "out", "grad", "grad_gate_up"), f"*{dtype}")
    types |= dict.fromkeys(("weights", "grad_weights"), "*fp32")
    suffix = " weighted" if weighted else ""
    return CompileCase(f"{name} {dtype}{suffix}", kernel, types, constants, unaligned=["R"], num_warps=warps)


COMPILE_CASES = [
    _compile_case(name, kernel, dtype, weighted)
    for name, kernel in (("swiglu", _forward_kernel), ("swiglu_backward", _backward_kernel))
    for dtype, weighted in (("bf16", True), ("bf16", False), ("fp32", True))
]
