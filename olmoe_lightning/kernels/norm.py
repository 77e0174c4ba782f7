"""RMSNorm, and the preparation of queries, keys and values (norm, then rotary positions).

N rows, W width, B batch, S sequence, Hq query heads, Hkv key/value heads, C head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from olmoe_lightning.kernels.choice import on_cpu
from olmoe_lightning.kernels.cpu.native import call, threads


def rms_norm(x: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; statistics in fp32, the result in x's dtype.

    Args:
        x: [..., W].
        weight_W: [W].
        eps: added to the mean square.
    """
    if on_cpu(x, weight_W) and weight_W.shape == x.shape[-1:] and weight_W.is_contiguous():
        return _RMSNorm.apply(x, weight_W, eps)
    return rms_norm_reference(x, weight_W, eps)


def rms_norm_reference(x: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """The definition in tensor operations."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight_W


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        width = x.shape[-1]
        call("rms_norm_forward", x, weight, x.numel() // width, width, float(eps), y, threads())
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        width = x.shape[-1]
        sizes = (x.numel() // width, width)
        call("rms_norm_backward", grad, x, weight, *sizes, float(ctx.eps), grad_x, grad_weight, threads())
        return grad_x, grad_weight, None


class HeadLayout(NamedTuple):
    """How a joint projection splits, and what of it is normalised together."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    flat_norm: bool
    """One norm over all heads of a token, or one over each head."""
    eps: float
    clip: float | None = None
    """Clamp of queries, keys and values between norm and rotation."""

    def norm_width(self, heads: int) -> int:
        """Values normalised together."""
        return heads * self.head_dim if self.flat_norm else self.head_dim


def prepare_qkv(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the joint projection, normalise queries and keys, and rotate them by their positions.

    The pairs (i, i + C/2) of a head rotate together, as in NeoX and Hugging Face.

    Args:
        qkv: [B, S, (Hq + 2 Hkv) C]: all queries, then keys, then values.
        q_weight: weight of the queries' norm ([Hq C] flat, [C] per head), ``None`` for no norm.
        k_weight: of the keys' norm ([Hkv C] or [C]).
        cos: fp32 [B or 1, S, 1, C/2].
        sin: the same shape.
        layout: of the heads.

    Returns:
        [B, S, Hq, C], [B, S, Hkv, C], [B, S, Hkv, C].
    """
    if layout.clip is None and on_cpu(qkv, q_weight, k_weight, cos, sin):
        return _PrepareQKV.apply(qkv, q_weight, k_weight, cos, sin, layout)
    return prepare_qkv_reference(qkv, q_weight, k_weight, cos, sin, layout)


def prepare_qkv_reference(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, layout: HeadLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition in tensor operations."""
    batch, seq, _ = qkv.shape
    kv_heads = layout.num_kv_heads

    def clamp(x: Tensor) -> Tensor:
        return x if layout.clip is None else x.clamp(-layout.clip, layout.clip)

    def prepare(x: Tensor, weight: Tensor | None, heads: int) -> Tensor:
        if weight is not None and layout.flat_norm:
            x = rms_norm_reference(x, weight, layout.eps)
        x = x.reshape(batch, seq, heads, layout.head_dim)
        if weight is not None and not layout.flat_norm:
            x = rms_norm_reference(x, weight, layout.eps)
        first, second = clamp(x).chunk(2, dim=-1)
        # Angles of far positions need fp32; the products are rounded to x's dtype once, at the end.
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    widths = [heads * layout.head_dim for heads in (layout.num_heads, kv_heads, kv_heads)]
    q, k, v = qkv.split(widths, dim=-1)
    return (
        prepare(q, q_weight, layout.num_heads),
        prepare(k, k_weight, kv_heads),
        clamp(v).reshape(batch, seq, kv_heads, layout.head_dim),
    )


class _PrepareQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        layout: HeadLayout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        batch, seq, stride = qkv.shape
        heads, kv_heads, width = layout.num_heads, layout.num_kv_heads, layout.head_dim
        q = qkv.new_empty(batch, seq, heads, width)
        k = qkv.new_empty(batch, seq, kv_heads, width)
        for out, weight, count, offset in ((q, q_weight, heads, 0), (k, k_weight, kv_heads, heads * width)):
            call(
                "norm_rotate_forward", qkv[..., offset:], stride, weight, cos, sin, batch * seq, cos.shape[0] * seq,
                count, width, 0 if weight is None else layout.norm_width(count), float(layout.eps), out, threads(),
            )  # fmt: skip
        v = qkv[..., (heads + kv_heads) * width :].reshape(batch, seq, kv_heads, width).contiguous()
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.layout = layout
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        layout: HeadLayout = ctx.layout
        batch, seq, stride = qkv.shape
        heads, kv_heads, width = layout.num_heads, layout.num_kv_heads, layout.head_dim
        grad_qkv = torch.empty_like(qkv)
        weight_grads = []
        for grad, weight, count, offset in (
            (grad_q.contiguous(), q_weight, heads, 0),
            (grad_k.contiguous(), k_weight, kv_heads, heads * width),
        ):
            weight_grads.append(None if weight is None else torch.empty_like(weight))
            call(
                "norm_rotate_backward", grad, qkv[..., offset:], stride, weight, cos, sin, batch * seq,
                cos.shape[0] * seq, count, width, 0 if weight is None else layout.norm_width(count), float(layout.eps),
                grad_qkv[..., offset:], weight_grads[-1], threads(),
            )  # fmt: skip
        grad_qkv[..., (heads + kv_heads) * width :].copy_(grad_v.reshape(batch, seq, -1))
        return grad_qkv, weight_grads[0], weight_grads[1], None, None, None
