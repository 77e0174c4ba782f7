"""SwiGLU with the router's weight folded in: ``silu(gate) * up * row_weight``.

R rows, H hidden width.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from olmoe_lightning.kernels.choice import on_gpu


def _wide(x: Tensor) -> Tensor:
    """At least fp32; fp64 stays, for numerical gradients."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _forward(gate_up: Tensor, row_weights: Tensor | None) -> Tensor:
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    hidden = gate * torch.sigmoid(gate) * up
    if row_weights is not None:
        hidden = hidden * row_weights[:, None]
    return hidden.to(gate_up.dtype)


def _backward(grad: Tensor, gate_up: Tensor, row_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    grad = _wide(grad)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_weights = None
    if row_weights is not None:
        grad_weights = (grad * silu * up).sum(-1)
        grad = grad * row_weights[:, None]
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([grad_gate, grad * silu], dim=-1).to(gate_up.dtype), grad_weights


class _SwiGLU(torch.autograd.Function):
    """Keeps the gate and up products only; everything else is cheap to compute again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, row_weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, row_weights)
        ctx.gpu = _gpu(gate_up, row_weights)
        return ctx.gpu.forward(gate_up, row_weights) if ctx.gpu else _forward(gate_up, row_weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        if ctx.gpu and not torch.is_grad_enabled():  # gradients of gradients need PyTorch's operations
            return ctx.gpu.backward(grad, *ctx.saved_tensors)
        return _backward(grad, *ctx.saved_tensors)


def _gpu(gate_up: Tensor, row_weights: Tensor | None) -> ModuleType | None:
    """The one place of choice: the Triton kernels, when they serve these operands."""
    if not on_gpu(gate_up, row_weights):
        return None
    from olmoe_lightning.kernels.gpu import swiglu as kernels

    return kernels if kernels.serves(gate_up, row_weights) else None


def swiglu(gate_up: Tensor, row_weights: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, each row times its weight; computed in fp32, returned in the input's dtype.

    Args:
        gate_up: [..., 2H], gate columns first. Two-dimensional [R, 2H] when ``row_weights`` is given.
        row_weights: fp32 [R] or ``None``.

    Returns:
        [..., H].
    """
    return _SwiGLU.apply(gate_up, row_weights)
