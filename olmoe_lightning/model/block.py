"""One transformer block: attention and a feed-forward (dense or MoE), each in a normalised residual branch."""

from __future__ import annotations

from torch import Tensor, nn

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model.attention import Attention, LayerCache, RMSNorm, Rotary, Visible
from olmoe_lightning.model.experts import FeedForward
from olmoe_lightning.model.moe import MoE
from olmoe_lightning.model.router import RoutingStats


class Block(nn.Module):
    """``x + post(attention(pre(x)))``, then ``x + post(feed_forward(pre(x)))``; which norms exist is an option.

    Args:
        config: of the model.
        layer: global index; the first ``num_dense_layers`` have a dense feed-forward.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()

        def norm(*placements: str) -> nn.Module:
            wanted = config.norm_placement in placements
            return RMSNorm(config.d_model, config.norm_eps) if wanted else nn.Identity()

        self.attn_norm = norm("pre", "peri")
        self.attn = Attention(config)
        self.attn_post_norm = norm("post", "peri")
        self.ffn_norm = norm("pre", "peri")
        self.moe: MoE | None = None
        self.mlp: FeedForward | None = None
        if layer < config.num_dense_layers:
            self.mlp = FeedForward(config.d_model, config.dense_hidden)
        else:
            self.moe = MoE(config)
        self.ffn_post_norm = norm("post", "peri")

    def forward(
        self,
        x_BSD: Tensor,
        rotary: Rotary,
        visible: Visible | None = None,
        token_mask_BS: Tensor | None = None,
        aux_scale: Tensor | None = None,
        cache: LayerCache | None = None,
        replay: list[Tensor] | None = None,
    ) -> tuple[Tensor, RoutingStats | None]:
        """[B, S, D] to [B, S, D], and the routing statistics (``None`` from a dense block)."""
        x_BSD = x_BSD + self.attn_post_norm(self.attn(self.attn_norm(x_BSD), rotary, visible, cache))
        normed = self.ffn_norm(x_BSD)
        stats = None
        if self.moe is not None:
            y, stats = self.moe(normed, token_mask_BS, aux_scale, replay)
        else:
            assert self.mlp is not None
            y = self.mlp(normed)
        return x_BSD + self.ffn_post_norm(y), stats
