"""Causal attention that stays inside documents.

B batch, S sequence, Hq query heads, Hkv key/value heads, C head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from olmoe_lightning.kernels.choice import on_cpu
from olmoe_lightning.kernels.cpu.native import call, threads


def visibility_mask(first_key_BS: Tensor) -> Tensor:
    """Which key each query may see: bool [B, 1, S, S], from its document's first key up to itself.

    Args:
        first_key_BS: integers [B, S], the first key that a query sees.
    """
    index = torch.arange(first_key_BS.shape[1], device=first_key_BS.device)
    return ((index >= first_key_BS[:, :, None]) & (index <= index[:, None]))[:, None]


def causal_attention(
    q_BSHC: Tensor, k_BSHC: Tensor, v_BSHC: Tensor, first_key_BS: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Softmax attention, scaled by 1/sqrt(C); query heads share key/value heads in consecutive groups.

    Args:
        q_BSHC: [B, S, Hq, C].
        k_BSHC: [B, S, Hkv, C].
        v_BSHC: [B, S, Hkv, C].
        first_key_BS: int32 [B, S], first visible key of each query; ``None``: 0.
        mask: :func:`visibility_mask` of it, if the caller has it.

    Returns:
        [B, S, Hq, C].
    """
    if on_cpu(q_BSHC, k_BSHC, v_BSHC) and q_BSHC.shape[1] == k_BSHC.shape[1]:
        if first_key_BS is None:
            first_key_BS = torch.zeros(q_BSHC.shape[:2], dtype=torch.int32)
        return _CausalAttention.apply(q_BSHC, k_BSHC, v_BSHC, first_key_BS)
    if first_key_BS is not None and mask is None:
        mask = visibility_mask(first_key_BS)
    return F.scaled_dot_product_attention(
        q_BSHC.transpose(1, 2),
        k_BSHC.transpose(1, 2),
        v_BSHC.transpose(1, 2),
        attn_mask=mask,
        # A single query against a cache of keys is the last one and sees them all.
        is_causal=mask is None and q_BSHC.shape[1] == k_BSHC.shape[1],
        enable_gqa=q_BSHC.shape[2] != k_BSHC.shape[2],
    ).transpose(1, 2)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, first_key: Tensor) -> Tensor:
        q, k, v, first_key = q.contiguous(), k.contiguous(), v.contiguous(), first_key.to(torch.int32).contiguous()
        batch, seq, heads, _ = q.shape
        out, lse = torch.empty_like(q), q.new_empty(batch, heads, seq)
        call("attention_forward", q, k, v, first_key, *_sizes(q, k), out, lse, threads())
        ctx.save_for_backward(q, k, v, first_key, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, first_key, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        inputs = (grad, q, k, v, out, lse, first_key)
        call("attention_backward", *inputs, *_sizes(q, k), grad_q, grad_k, grad_v, threads())
        return grad_q, grad_k, grad_v, None


def _sizes(q: Tensor, k: Tensor) -> tuple[float, ...]:
    """B, S, Hq, Hkv, C and the scale of the scores."""
    batch, seq, heads, width = q.shape
    return batch, seq, heads, k.shape[2], width, width**-0.5
