"""The decoder: embedding, blocks, final norm, head.

B batch, S sequence, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model.attention import LayerCache, RMSNorm, Rotary, Visible, document_positions
from olmoe_lightning.model.block import Block
from olmoe_lightning.model.init import Embedding, Linear, init_weights
from olmoe_lightning.model.losses import LossSums, linear_cross_entropy
from olmoe_lightning.model.router import RoutingStats


class KVCache:
    """Keys and values of all layers for generation.

    Args:
        config: of the model.
        capacity: positions to make room for, prompt included.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(config.num_layers)]

    @property
    def length(self) -> int:
        """Positions held."""
        return self.layers[0].length


class Transformer(nn.Module):
    """A mixture-of-experts language model.

    Weights are uninitialised until :meth:`init_weights`; built under ``torch.device("meta")`` they take no memory.

    Args:
        config: everything about it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.embed_norm: nn.Module = RMSNorm(config.d_model, config.norm_eps) if config.embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = Linear(config.d_model, config.vocab_size, bias=False)

    def init_weights(self, seed: int, first_expert: int = 0) -> None:
        """Initialise every parameter; equal for every layout of the same (seed, configuration).

        Args:
            seed: of the run.
            first_expert: global index of the first expert that is held here.
        """
        init_weights(self, seed, self.config.init_std, first_expert)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; the embedding's when they are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self,
        input_ids_BS: Tensor,
        document_ids_BS: Tensor | None = None,
        token_mask_BS: Tensor | None = None,
        aux_scale: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Hidden states before the head.

        Args:
            input_ids_BS: int64 [B, S].
            document_ids_BS: integers [B, S], equal within a document; attention and positions stay inside one.
                ``None``: each row is one document.
            token_mask_BS: bool [B, S]; tokens that count in the auxiliary losses and statistics; ``None``: all.
            aux_scale: fp32 []; gradient that the sum of the auxiliary losses receives (see
                :func:`~olmoe_lightning.model.losses.attach_loss`); ``None`` to leave them out.
            cache: of earlier tokens; not together with documents.

        Returns:
            [B, S, D] and the statistics of the MoE layers, stacked (``None`` without any).

        Raises:
            ValueError: documents and a cache were both given.
        """
        if cache is not None and document_ids_BS is not None:
            raise ValueError("a key/value cache holds one document per row; give either cache or document_ids")
        x = self.embed(input_ids_BS)
        if self.config.embed_scale:
            x = x * math.sqrt(self.config.d_model)
        x = self.embed_norm(x)

        visible = None
        if document_ids_BS is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + input_ids_BS.shape[1], device=input_ids_BS.device)[None]
        else:
            positions = document_positions(document_ids_BS)
            visible = Visible.of(positions)
        rotary = Rotary.of(positions, self.config)

        layers: list[RoutingStats] = []
        for index, block in enumerate(self.blocks):
            arguments: tuple[Any, ...] = (x, rotary, visible, token_mask_BS, aux_scale)
            if self.config.recompute == "block" and torch.is_grad_enabled() and cache is None:
                x, stats = checkpoint(block, *arguments, None, [], use_reentrant=False)
            else:
                x, stats = block(*arguments, cache.layers[index] if cache is not None else None)
            if stats is not None:
                layers.append(stats)
        return self.norm(x), RoutingStats.stack(layers) if layers else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to fp32 [..., V]."""
        return F.linear(hidden, self.head_weight).float()

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor) -> LossSums:
        """Cross entropy and z-loss sums against shifted labels, see :func:`linear_cross_entropy`."""
        flat = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
        return linear_cross_entropy(flat, self.head_weight, labels_BS.reshape(-1), self.config.lm_z_loss_coeff)
