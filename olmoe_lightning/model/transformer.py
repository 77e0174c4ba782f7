"""The decoder: embedding, blocks, final norm, head.

B batch, S sequence, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError
from olmoe_lightning.model.attention import LayerCache, RMSNorm, Rotary, Visible, document_positions
from olmoe_lightning.model.block import Block
from olmoe_lightning.model.init import Embedding, Linear, init_weights
from olmoe_lightning.model.losses import LossSums, linear_cross_entropy
from olmoe_lightning.model.router import RoutingStats


class KVCache:
    """Keys and values of all layers for generation.

    Args:
        config: of the model.
        capacity: most positions that it holds, prompt included.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(config.num_layers)]

    def length(self, layer: int = 0) -> int:
        """Positions that a layer holds. They differ while a token passes through, and where stages share the cache."""
        return self.layers[layer].length


class Blocks(nn.ModuleList):
    """Blocks under their global layer numbers; those of other pipeline stages are missing.

    Args:
        blocks: by layer number, ascending.
    """

    def __init__(self, blocks: Mapping[int, Block]) -> None:
        super().__init__()
        for layer, block in blocks.items():
            self.add_module(str(layer), block)

    @property
    def layers(self) -> list[int]:
        """Numbers of the blocks that are here."""
        return [int(name) for name, _ in self.named_children()]

    def __getitem__(self, layer: int) -> Block:  # type: ignore[override]
        """The block of a layer, by its global number; negative numbers count from the last one that is here."""
        block = self.get_submodule(str(layer if layer >= 0 else self.layers[layer]))
        assert isinstance(block, Block)
        return block


class Transformer(nn.Module):
    """A mixture-of-experts language model, or some of its layers.

    Weights are uninitialised until :meth:`init_weights`; built under ``torch.device("meta")`` they take no memory.

    Args:
        config: everything about it.
        layers: numbers of the blocks to build; all when ``None``. The names of parameters carry these numbers.
        first: whether to build the embedding.
        last: whether to build the final norm and the head.
    """

    def __init__(
        self, config: ModelConfig, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        self.embed: Embedding | None = None
        self.embed_norm: nn.Module | None = None
        if first:
            self.embed = Embedding(config.vocab_size, config.d_model)
            self.embed_norm = RMSNorm(config.d_model, config.norm_eps) if config.embed_norm else nn.Identity()
        numbers = range(config.num_layers) if layers is None else layers
        self.blocks = Blocks({layer: Block(config, layer) for layer in numbers})
        self.norm: RMSNorm | None = None
        self.head: nn.Linear | None = None
        if last:
            self.norm = RMSNorm(config.d_model, config.norm_eps)
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
        if self.head is not None:
            return self.head.weight
        assert self.embed is not None
        return self.embed.weight

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
            UserError: some layers are in other processes.
        """
        if cache is not None and document_ids_BS is not None:
            raise ValueError("a key/value cache holds one document per row; give either cache or document_ids")
        layers = self.blocks.layers
        if len(layers) < self.config.num_layers or self.embed is None or self.norm is None:
            raise UserError(
                f"this process holds layers {layers} of {self.config.num_layers}, which alone are no model: other "
                "processes of the pipeline have the rest; call MoEStrategy.pipeline_forward in a run, or save a "
                "checkpoint with trainer.save_checkpoint, and load it in one process with load_from_checkpoint"
            )
        x = self.embed_tokens(input_ids_BS)
        x, stats = self.through_blocks(x, layers, document_ids_BS, token_mask_BS, aux_scale, cache)
        return self.norm(x), RoutingStats.stack(stats) if stats else None

    def embed_tokens(self, input_ids_BS: Tensor) -> Tensor:
        """[B, S, D] before the first block."""
        assert self.embed is not None
        assert self.embed_norm is not None
        x = self.embed(input_ids_BS)
        if self.config.embed_scale:
            x = x * math.sqrt(self.config.d_model)
        return self.embed_norm(x)

    def through_blocks(
        self,
        x_BSD: Tensor,
        layers: Iterable[int],
        document_ids_BS: Tensor | None = None,
        token_mask_BS: Tensor | None = None,
        aux_scale: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, list[RoutingStats]]:
        """Some consecutive blocks; arguments as in :meth:`forward`.

        Returns:
            [B, S, D], and the statistics of those blocks that have a router.
        """
        visible = None
        layers = list(layers)
        if document_ids_BS is None:
            start = cache.length(layers[0]) if cache is not None and layers else 0
            positions = torch.arange(start, start + x_BSD.shape[1], device=x_BSD.device)[None]
        else:
            positions = document_positions(document_ids_BS)
            visible = Visible.of(positions)
        rotary = Rotary.of(positions, self.config)

        found: list[RoutingStats] = []
        for layer in layers:
            block = self.blocks[layer]
            arguments: tuple[Any, ...] = (x_BSD, rotary, visible, token_mask_BS, aux_scale)
            if self.config.recompute == "block" and torch.is_grad_enabled() and cache is None:
                x_BSD, stats = checkpoint(block, *arguments, None, [], use_reentrant=False)
            else:
                x_BSD, stats = block(*arguments, cache.layers[layer] if cache is not None else None)
            if stats is not None:
                found.append(stats)
        return x_BSD, found

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to fp32 [..., V]."""
        return F.linear(hidden, self.head_weight).float()

    def loss(self, hidden_BSD: Tensor, labels_BS: Tensor) -> LossSums:
        """Cross entropy and z-loss sums against shifted labels, see :func:`linear_cross_entropy`."""
        flat = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
        return linear_cross_entropy(flat, self.head_weight, labels_BS.reshape(-1), self.config.lm_z_loss_coeff)
