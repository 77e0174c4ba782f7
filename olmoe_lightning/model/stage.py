"""A stage of a pipeline: some of a transformer's layers, with the embedding before or the final norm after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from olmoe_lightning.model.losses import IGNORE_INDEX
from olmoe_lightning.model.router import RoutingStats
from olmoe_lightning.model.transformer import Blocks, KVCache, Transformer


class Stage(nn.Module):
    """Shares the modules of ``transformer``; its own parameters are those of its layers.

    Args:
        transformer: holds at least these layers.
        layers: global numbers, consecutive.
        first: starts from tokens instead of hidden states.
        last: ends with the final norm; the head belongs to it too.
    """

    def __init__(self, transformer: Transformer, layers: Sequence[int], first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.blocks = Blocks({layer: transformer.blocks[layer] for layer in layers})
        if first:
            self.embed, self.embed_norm = transformer.embed, transformer.embed_norm
        if last:
            self.norm, self.head = transformer.norm, transformer.head
            if transformer.head is None:
                self.embed = transformer.embed
        self._transformer = (transformer,)  # not a submodule: it may hold other stages too
        self._stats: list[RoutingStats] = []
        self.cache: KVCache | None = None
        """Keys and values of earlier tokens, while text is written."""

    def forward(self, x: Tensor, labels: Tensor, document_ids: Tensor | None = None, **_: Tensor) -> Tensor:
        """One microbatch.

        Args:
            x: int64 [B, S] tokens in the first stage, else hidden states [B, S, D].
            labels: int64 [B, S]; tokens without one do not count in the layers' own losses and statistics.
            document_ids: integers [B, S].

        Returns:
            Hidden states [B, S, D].
        """
        (transformer,) = self._transformer
        if self.first:
            x = transformer.embed_tokens(x)
        aux_scale = torch.ones((), device=x.device) if torch.is_grad_enabled() else None
        mask = labels != IGNORE_INDEX
        x, stats = transformer.through_blocks(x, self.blocks.layers, document_ids, mask, aux_scale, self.cache)
        if stats:
            self._stats.append(RoutingStats.stack(stats))
        if self.last:
            assert transformer.norm is not None
            x = transformer.norm(x)
        return x

    def take_stats(self) -> RoutingStats | None:
        """Statistics of this stage's routers over the microbatches since the last call; ``None`` without any."""
        stats, self._stats = self._stats, []
        if not stats:
            return None
        total = stats[0]
        for other in stats[1:]:
            total = total.merge(other)
        return total
