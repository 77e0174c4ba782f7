"""The MoE layer: router, dispatch, experts, combine, and a shared expert beside them.

T tokens, K chosen experts, R rows, E experts, D model width, B batch, S sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import LocalTransport, Transport
from olmoe_lightning.model.experts import Experts, FeedForward
from olmoe_lightning.model.losses import attach_loss
from olmoe_lightning.model.router import Router, RoutingStats


class MoE(nn.Module):
    """A mixture of experts in place of a feed-forward network.

    Args:
        config: router, experts and the recompute policy of it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.d_model, config.expert_hidden)
        self.shared = FeedForward(config.d_model, config.shared_hidden) if config.shared_hidden else None
        self.transport: Transport = LocalTransport(config.num_experts)
        self.recompute_experts = config.recompute == "experts"
        self.config = config
        self.placed: tuple[int, int] | None = None
        """(rank, ranks) of :meth:`place`; ``None`` while all experts are here."""

    def place(self, rank: int, ranks: int, transport: Transport) -> None:
        """Keep the own share of the experts, and reach the others through ``transport``.

        Args:
            rank: of this process among those that share the experts.
            ranks: their number; it divides the number of experts.
            transport: carries tokens to all experts of the layer.

        Raises:
            ValueError: the experts cannot be shared evenly, or were shared among other ranks before.
        """
        experts = self.config.num_experts
        if experts % ranks:
            raise ValueError(f"num_experts ({experts}) must be divisible by expert_parallel_size ({ranks})")
        if self.placed is None or self.placed == (0, 1):  # all experts are here
            if ranks > 1:
                self.experts.keep(rank * experts // ranks, experts // ranks)
            self.placed = (rank, ranks)
        elif self.placed != (rank, ranks):
            raise ValueError(
                f"this layer's {experts} experts were shared among {self.placed[1]} processes before (this one was "
                f"number {self.placed[0]}), and cannot be shared among {ranks} now; build the model anew, or load it "
                "from a checkpoint"
            )
        self.transport = transport

    def forward(
        self,
        x_BSD: Tensor,
        token_mask_BS: Tensor | None = None,
        aux_scale: Tensor | None = None,
        replay: list[Tensor] | None = None,
    ) -> tuple[Tensor, RoutingStats]:
        """Route, travel, compute, return.

        Args:
            x_BSD: [B, S, D].
            token_mask_BS: bool [B, S]; tokens that count in losses and statistics.
            aux_scale: fp32 []; gradient of the auxiliary losses' sum. ``None`` leaves them out of the backward pass.
            replay: a list that is empty at the first call and then holds the choice of experts; a second call with it
                makes the same choice again, whatever rounding did to the scores (recompute).

        Returns:
            [B, S, D] and this layer's statistics.
        """
        fallbacks = self.transport.fallbacks
        routing = self.router(x_BSD, token_mask_BS, replay[0] if replay else None, fallbacks)
        if replay is not None and not replay:
            replay.append(routing.ranking)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        others = {"fallback_ids_TF": routing.ranking[:, -fallbacks:]} if fallbacks else {}
        sent = self.transport.dispatch(x_TD, routing.expert_ids, routing.weights, **others)
        if self.recompute_experts and torch.is_grad_enabled():
            rows = checkpoint(self.experts, *sent[:3], use_reentrant=False, preserve_rng_state=False)
        else:
            rows = self.experts(*sent[:3])
        y = self.transport.combine(rows, sent.handle).view_as(x_BSD)
        if self.shared is not None:
            y = y + self.shared(x_BSD)
        if aux_scale is not None:
            y = attach_loss(y, routing.aux_loss, aux_scale)
        return y, routing.stats
