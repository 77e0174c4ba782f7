"""The router: which K of E experts each token goes to, with which weights, and what that says about balance.

T tokens, K experts chosen per token, E experts, D model width, B sequences of the batch, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import no_autocast, top_k_stable


class RoutingStats(NamedTuple):
    """Sums over the tokens that count (those with a label), so that statistics of microbatches add up field by field.

    Each tensor is detached. A single layer has no leading Lm; :meth:`stack` adds it.
    """

    counts: Tensor
    """int64 [Lm, E]: how often each expert was chosen (requested, whether or not a backend later drops the route)."""
    prob_sum: Tensor
    """fp32 [Lm, E]: sum of the normalised router probabilities."""
    entropy_sum: Tensor
    """fp32 [Lm]: sum of the entropies of those probabilities, in nats."""
    z_sum: Tensor
    """fp32 [Lm]: sum of logsumexp(logits)^2."""
    balance_sum: Tensor
    """fp32 [Lm]: balance loss without its coefficient, times the tokens of its scope."""
    num_tokens: Tensor
    """int64 [Lm] of one value (stacked: []): tokens that count."""

    @classmethod
    def stack(cls, layers: list[RoutingStats]) -> RoutingStats:
        """Statistics of several layers under one leading dimension; all layers saw the same tokens."""
        fields = [torch.stack(values) for values in zip(*layers, strict=True)]
        return cls(*fields)._replace(num_tokens=fields[-1][0])

    def merge(self, other: RoutingStats) -> RoutingStats:
        """Statistics of two batches together."""
        return RoutingStats(*(a + b for a, b in zip(self, other, strict=True)))


class Routing(NamedTuple):
    """What the router decided for T tokens."""

    expert_ids: Tensor
    """int64 [T, K], best first; equal scores are ordered by expert index."""
    weights: Tensor
    """fp32 [T, K], differentiable."""
    aux_loss: Tensor
    """fp32 []: coefficients applied, a sum over tokens; its gradient reaches the router when it is attached."""
    stats: RoutingStats


class _LogSumExp(torch.autograd.Function):
    """Logsumexp of rows whose softmax is known: one read forward, one product backward."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, probs_TE: Tensor) -> Tensor:
        ctx.save_for_backward(probs_TE)
        # log p = logit - logsumexp, read off where p is largest.
        top_p, top = probs_TE.max(dim=-1, keepdim=True)
        return (logits_TE.gather(1, top) - top_p.log())[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        (probs_TE,) = ctx.saved_tensors
        return grad_T[:, None] * probs_TE, None


class Router(nn.Module):
    """Scores, choice, weights, losses and statistics; a pure function of its input, in fp32 whatever x is.

    Args:
        config: the router's fields of :class:`ModelConfig`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.d_model))
        self.selection_bias: Tensor | None
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("selection_bias", bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # Small steps accumulate in the selection bias; bf16 would round them away, so casts only move it.
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias is not None and self.selection_bias.dtype != torch.float32:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self

    def forward(self, x_BSD: Tensor, token_mask_BS: Tensor | None = None, chosen_TK: Tensor | None = None) -> Routing:
        """Route every token.

        Args:
            x_BSD: [B, S, D], any floating dtype.
            token_mask_BS: bool [B, S]; which tokens count in losses and statistics (all when ``None``). The others are
                routed too, they are only not counted.
            chosen_TK: int64 [T, K]; a choice made before, to be used again instead of a new one (recompute).

        Returns:
            A :class:`Routing`.
        """
        with no_autocast(x_BSD):
            return self._route(x_BSD, token_mask_BS, chosen_TK)

    def _route(self, x_BSD: Tensor, token_mask_BS: Tensor | None, chosen_TK: Tensor | None) -> Routing:
        config = self.config
        batch, seq, width = x_BSD.shape
        x_TD = x_BSD.reshape(-1, width).float()
        if self.training and config.router_jitter > 0:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - config.router_jitter, 1 + config.router_jitter)
        logits_TE = F.linear(x_TD, self.weight.float())
        if config.score_function == "sigmoid":
            logsumexp_T = torch.logsumexp(logits_TE, dim=-1)
            scores_TE = torch.sigmoid(logits_TE) + 1e-7  # never all zero, so that normalising is safe
            probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
            entropy_T = torch.special.entr(probs_TE.detach()).sum(-1)
        else:
            scores_TE = probs_TE = torch.softmax(logits_TE, dim=-1)
            logsumexp_T = _LogSumExp.apply(logits_TE, probs_TE.detach())
            entropy_T = (logsumexp_T - torch.linalg.vecdot(probs_TE, logits_TE)).detach()

        if config.router_mode == "random":
            # A benchmark's routing: as if the scores were noise. The product with zero keeps the router in the graph.
            # One draw, made on a replay too, so that recompute finds the same weights at the same generator state.
            scores_TE = scores_TE * 0 + torch.rand_like(scores_TE)
        expert_ids_TK = chosen_TK if chosen_TK is not None else self._choose(logits_TE, scores_TE)
        weights_TK = self._weights(logits_TE, scores_TE, expert_ids_TK)

        mask_T = None if token_mask_BS is None else token_mask_BS.reshape(-1)
        aux_loss, stats = self._losses(probs_TE, logsumexp_T, entropy_T, expert_ids_TK, mask_T, batch, seq)
        return Routing(expert_ids_TK, weights_TK, aux_loss, stats)

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        config = self.config
        tokens, experts = scores_TE.shape
        if config.router_mode == "uniform":
            slots = torch.arange(tokens * config.top_k, device=scores_TE.device)
            return (slots % experts).view(tokens, config.top_k)
        if config.router_mode == "random":
            return top_k_stable(scores_TE, config.top_k)
        selection = (logits_TE if config.score_function == "topk_softmax" else scores_TE).detach()
        if self.selection_bias is not None:
            selection = selection + self.selection_bias
        if config.num_groups > 1:
            selection = self._mask_groups(selection)
        return top_k_stable(selection, config.top_k)

    def _mask_groups(self, selection_TE: Tensor) -> Tensor:
        """Minus infinity outside the best groups; a group is as good as the sum of its two best experts."""
        config = self.config
        grouped = selection_TE.view(selection_TE.shape[0], config.num_groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, top_k_stable(best, config.top_k_groups), True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)

    def _weights(self, logits_TE: Tensor, scores_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
        config = self.config
        if config.score_function == "topk_softmax" and config.router_mode != "random":
            weights = torch.softmax(logits_TE.gather(1, expert_ids_TK), dim=-1)
        else:
            weights = scores_TE.gather(1, expert_ids_TK)
        if config.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        scale = config.expert_weight_scale * (config.top_k if config.restore_weight_scale else 1)
        return weights * scale if scale != 1 else weights

    def _losses(
        self,
        probs_TE: Tensor,
        logsumexp_T: Tensor,
        entropy_T: Tensor,
        expert_ids_TK: Tensor,
        mask_T: Tensor | None,
        batch: int,
        seq: int,
    ) -> tuple[Tensor, RoutingStats]:
        """Balance and z-loss as sums over the counted tokens.

        Per scope of T tokens: T · E/K · sum_e f_e · P_e with f_e = count_e / T (no gradient) and P_e the mean
        probability. At perfect balance f = K/E and P = 1/E, so the sum is exactly T: the loss per token is 1 for
        every E and K, and the coefficient is what it says.
        """
        config = self.config
        experts, k = config.num_experts, config.top_k
        scopes = batch if config.balance_loss_scope == "sequence" else 1
        logsumexp_sq_T = logsumexp_T.square()
        routes = torch.ones_like(expert_ids_TK)
        if mask_T is None:
            tokens = torch.full((scopes,), batch * seq // scopes, device=probs_TE.device)
        else:
            tokens = mask_T.view(scopes, -1).sum(-1)
            # where, not a product: a padded token's NaN must not reach the sums.
            probs_TE = torch.where(mask_T[:, None], probs_TE, 0.0)
            routes = routes * mask_T[:, None]
            logsumexp_sq_T = torch.where(mask_T, logsumexp_sq_T, 0.0)
            entropy_T = torch.where(mask_T, entropy_T, 0.0)
        prob_sum = probs_TE.view(scopes, -1, experts).sum(1)
        counts = torch.zeros(scopes, experts, dtype=torch.int64, device=probs_TE.device)
        counts.scatter_add_(1, expert_ids_TK.view(scopes, -1), routes.view(scopes, -1))
        balance_sum = ((counts * prob_sum).sum(-1) / tokens.clamp(min=1)).sum() * (experts / k)
        z_sum = logsumexp_sq_T.sum()
        aux_loss = config.balance_loss_coeff * balance_sum + config.router_z_loss_coeff * z_sum
        stats = RoutingStats(
            counts.sum(0),
            prob_sum.sum(0).detach(),
            entropy_T.sum(),
            z_sum.detach(),
            balance_sum.detach(),
            tokens.sum(),
        )
        return aux_loss, stats

    @torch.no_grad()
    def update_selection_bias(self, counts_E: Tensor) -> None:
        """Shift the bias towards the experts that got less than the mean, by ``bias_update_rate`` each.

        To be called once per optimizer step with the counts of the whole global batch (Wang et al. 2024,
        arXiv 2408.15664).

        Args:
            counts_E: [E] integers.
        """
        if self.selection_bias is None or self.config.bias_update_rate == 0:
            return
        # Integers, multiplied out: no rounding may flip the sign of a small difference.
        excess = counts_E.sum() - counts_E * counts_E.numel()
        self.selection_bias += self.config.bias_update_rate * excess.sign().to(torch.float32)
