"""Causal self-attention with rotary positions, QK-norm, grouped queries, document boundaries and a key/value cache.

B batch, S sequence, Hq query heads, Hkv key/value heads, C head width, D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import HeadLayout, causal_attention, prepare_qkv, rms_norm, visibility_mask
from olmoe_lightning.model.init import Linear


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``; statistics in fp32, the product in x's dtype.

    Args:
        width: of the normalised dimension.
        eps: added to the mean square.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


class Rotary(NamedTuple):
    """Cosine and sine of every position's angles, fp32 [B or 1, S, 1, C/2]; the same for all layers."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions_BS: Tensor, config: ModelConfig) -> Rotary:
        """Angles of the given positions (integers, [B or 1, S])."""
        half = config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32, device=positions_BS.device) / half
        angles = positions_BS[:, :, None, None].float() * torch.pow(config.rope_theta, -exponents)
        return cls(angles.cos(), angles.sin())


class Visible(NamedTuple):
    """What each query may see, from its document's first key up to itself; the same for all layers."""

    first_key_BS: Tensor
    """int32 [B, S]."""
    mask: Tensor | None
    """The same as a bool [B, 1, S, S]; ``None`` on a CPU, where it is made only if the ranges cannot be used."""

    @classmethod
    def of(cls, positions_BS: Tensor) -> Visible:
        """From the position of each token inside its document."""
        index = torch.arange(positions_BS.shape[1], device=positions_BS.device)
        first_key = (index - positions_BS).to(torch.int32)
        return cls(first_key, None if first_key.device.type == "cpu" else visibility_mask(first_key))


def document_positions(document_ids_BS: Tensor) -> Tensor:
    """Position of each token inside its document: 0 where the document changes, counting up from there.

    Args:
        document_ids_BS: integers [B, S], equal within a document, different between neighbours.

    Returns:
        int64 [B, S].
    """
    index = torch.arange(document_ids_BS.shape[1], device=document_ids_BS.device).expand_as(document_ids_BS)
    first = torch.ones_like(document_ids_BS[:, :1], dtype=torch.bool)
    starts = torch.cat([first, document_ids_BS[:, 1:] != document_ids_BS[:, :-1]], dim=1)
    return index - torch.where(starts, index, 0).cummax(dim=1).values


class LayerCache:
    """Keys and values of one layer's earlier tokens, [B, capacity, Hkv, C], allocated on first use.

    Args:
        capacity: most positions that it holds.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, S, Hkv, C] and return all so far.

        Raises:
            ValueError: more positions than the capacity, or several at once after the first call.
        """
        if self.length and keys.shape[1] > 1:
            raise ValueError(
                f"the key/value cache holds {self.length} positions already and is extended one at a time, "
                f"not by {keys.shape[1]}"
            )
        end = self.length + keys.shape[1]
        if end > self.capacity:
            raise ValueError(f"the key/value cache holds {self.capacity} positions, {end} are needed")
        if self._keys is None or self._values is None:
            shape = (keys.shape[0], self.capacity, *keys.shape[2:])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, self.length : end] = keys
        self._values[:, self.length : end] = values
        self.length = end
        return self._keys[:, :end], self._values[:, :end]


class Attention(nn.Module):
    """Multi-head attention; queries, keys and values in one product.

    Args:
        config: widths, heads, ``qk_norm`` and ``clip_qkv`` of it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        flat = config.qk_norm == "flat"
        self.layout = HeadLayout(
            config.num_heads, config.num_kv_heads, config.head_dim, flat, config.norm_eps, config.clip_qkv
        )
        self.qkv = Linear(config.d_model, config.attention_dim + 2 * config.kv_dim, bias=False)
        self.out = Linear(config.attention_dim, config.d_model, bias=False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm != "none":
            self.q_norm = RMSNorm(self.layout.norm_width(config.num_heads), config.norm_eps)
            self.k_norm = RMSNorm(self.layout.norm_width(config.num_kv_heads), config.norm_eps)

    def forward(
        self, x_BSD: Tensor, rotary: Rotary, visible: Visible | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Attend.

        Args:
            x_BSD: [B, S, D].
            rotary: of these S positions.
            visible: which keys each query sees; ``None``: all up to itself.
            cache: keys and values of earlier tokens, extended by these.

        Returns:
            [B, S, D].
        """
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        q, k, v = prepare_qkv(self.qkv(x_BSD), q_weight, k_weight, rotary.cos, rotary.sin, self.layout)
        if cache is not None:
            k, v = cache.extend(k, v)
        y = causal_attention(q, k, v, *(visible or (None, None)))
        return self.out(y.reshape(*x_BSD.shape[:2], -1))
