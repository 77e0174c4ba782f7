"""The router: which K of E experts each token goes to, with which weights, and what that says about balance.

T tokens, K experts chosen per token, E experts, D model width, B sequences of the batch, S tokens of a sequence,
G scopes of the balance loss (each sequence, or all tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import RouterRows, no_autocast, router_rows, top_k_stable


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
    """fp64 [Lm]: sum of logsumexp(logits)^2, whose squares may be beyond fp32."""
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
    ranking: Tensor
    """int64 [T, K + F]: the choice, and the F experts that would have been next."""


def lacks_gradient(config: ModelConfig) -> str:
    """Why a configuration gives its routers no gradient at all, neither from weights nor from losses; empty if it does.

    A weight that is the same whatever the logits has none. The balance loss is a product of load and probability, and
    probabilities add up to one: with the same load everywhere it has none either.
    """
    normalized = config.normalize_weights or config.score_function == "topk_softmax"
    if config.router_mode == "random":
        weights = "router_mode='random' weighs experts by noise"
    elif config.num_experts == 1 and (normalized or config.score_function == "softmax"):
        weights = "the weight of the only expert (num_experts=1) is always 1"
    elif config.top_k == 1 and normalized:
        by = "normalize_weights=True" if config.normalize_weights else "score_function='topk_softmax'"
        weights = f"the weight of the one expert that is chosen (top_k=1) is always 1 with {by}"
    else:
        return ""
    if config.router_z_loss_coeff:
        return ""
    if config.balance_loss_coeff and config.top_k < config.num_experts:
        return ""
    if config.balance_loss_coeff:
        return f"{weights}, the balance loss is constant where all experts are chosen, and router_z_loss_coeff is 0"
    return f"{weights}, and balance_loss_coeff and router_z_loss_coeff are 0"


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

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # Small steps accumulate in the selection bias; bf16 would round them away, so casts only move it.
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias is not None and self.selection_bias.dtype != torch.float32:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self

    def forward(
        self,
        x_BSD: Tensor,
        token_mask_BS: Tensor | None = None,
        chosen_TK: Tensor | None = None,
        fallbacks: int = 0,
    ) -> Routing:
        """Route every token.

        Args:
            x_BSD: [B, S, D], any floating dtype.
            token_mask_BS: bool [B, S]; which tokens count in losses and statistics (all when ``None``). The others are
                routed too, they are only not counted.
            chosen_TK: int64 [T, K]; a choice made before, to be used again instead of a new one (recompute). With
                fallbacks the ``ranking`` of that time, [T, K + F].
            fallbacks: F, how many experts to name beyond the choice, for a comm plugin that may need others.

        Returns:
            A :class:`Routing`.
        """
        with no_autocast(x_BSD):
            return self._route(x_BSD, token_mask_BS, chosen_TK, fallbacks)

    def _route(self, x_BSD: Tensor, token_mask_BS: Tensor | None, ranking: Tensor | None, fallbacks: int) -> Routing:
        config = self.config
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1]).float()
        if self.training and config.router_jitter > 0:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - config.router_jitter, 1 + config.router_jitter)
        logits_TE = F.linear(x_TD, self.weight.float())
        # One draw, made on a replay too, so that recompute finds the same weights at the same generator state.
        noise_TE = torch.rand_like(logits_TE) if config.router_mode == "random" else None

        def choose(scores_TE: Tensor) -> Tensor:
            nonlocal ranking
            if ranking is None:
                ranking = self._choose(logits_TE.detach(), scores_TE, noise_TE, config.top_k + fallbacks)
            return ranking[:, : config.top_k].contiguous()

        mask_T = None if token_mask_BS is None else token_mask_BS.reshape(-1)
        scopes = len(x_BSD) if config.balance_loss_scope == "sequence" else 1
        rows = router_rows(logits_TE, choose, mask_T, scopes, sigmoid=config.score_function == "sigmoid")
        weights_TK = self._weights(rows, noise_TE)
        aux_loss, stats = self._losses(rows, mask_T)
        assert ranking is not None
        return Routing(rows.expert_ids_TK, weights_TK, aux_loss, stats, ranking)

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, noise_TE: Tensor | None, count: int) -> Tensor:
        config = self.config
        tokens, experts = scores_TE.shape
        if config.router_mode == "uniform":
            first_T = torch.arange(tokens, device=scores_TE.device) * config.top_k
            return (first_T[:, None] + torch.arange(count, device=scores_TE.device)) % experts
        if noise_TE is not None:
            return top_k_stable(noise_TE, count)
        selection = logits_TE  # which order experts as scores do, also where these are all rounded to zero or to one
        if config.score_function != "topk_softmax" and self.selection_bias is not None:
            selection = scores_TE
        if self.selection_bias is not None:
            selection = selection + self.selection_bias
        if config.num_groups > 1:
            selection = selection.masked_fill(~self._in_best_groups(selection), float("-inf"))
        return top_k_stable(selection, count)

    def _in_best_groups(self, selection_TE: Tensor) -> Tensor:
        """Where the best groups are, bool [T, E]; a group is as good as the sum of its two best experts."""
        config = self.config
        grouped = selection_TE.view(selection_TE.shape[0], config.num_groups, -1)
        two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
        if config.score_function == "topk_softmax" or self.selection_bias is not None:
            best = two.sum(-1)
        else:  # the sum is of scores, of which these are the logits
            best = (F.logsigmoid(two) if config.score_function == "sigmoid" else two).logsumexp(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, top_k_stable(best, config.top_k_groups), True)
        return kept[..., None].expand_as(grouped).flatten(1)

    def _weights(self, rows: RouterRows, noise_TE: Tensor | None) -> Tensor:
        config = self.config
        weights = rows.scores_TK
        if noise_TE is not None:
            # A benchmark's routing: as if the scores were noise. The product with zero keeps the router in the graph.
            weights = weights * 0 + noise_TE.gather(1, rows.expert_ids_TK)
            if config.normalize_weights:
                weights = weights / weights.sum(-1, keepdim=True)
        elif config.normalize_weights or config.score_function == "topk_softmax":
            # By logarithms: a bias, or a choice that was made elsewhere, may fall on experts whose scores are all zero.
            log_scores = F.logsigmoid(rows.logits_TK) if config.score_function == "sigmoid" else rows.logits_TK
            weights = torch.softmax(log_scores, dim=-1)
        scale = config.expert_weight_scale * (config.top_k if config.restore_weight_scale else 1)
        return weights * scale if scale != 1 else weights

    def _losses(self, rows: RouterRows, mask_T: Tensor | None) -> tuple[Tensor, RoutingStats]:
        """Balance and z-loss as sums over the counted tokens.

        Per scope of T tokens: T · E/K · sum_e f_e · P_e with f_e = count_e / T (no gradient) and P_e the mean
        probability. At perfect balance f = K/E and P = 1/E, so the sum is exactly T: the loss per token is 1 for
        every E and K, and the coefficient is what it says.
        """
        config = self.config
        scopes, experts = rows.prob_sum_GE.shape
        expert_ids_TK, entropy_T = rows.expert_ids_TK, rows.entropy_T
        logsumexp_sq_T = rows.logsumexp_T.double().square()
        routes = torch.ones_like(expert_ids_TK)
        if mask_T is None:
            tokens_G = torch.full((scopes,), len(entropy_T) // scopes, device=entropy_T.device)
        else:
            tokens_G = mask_T.view(scopes, -1).sum(-1)
            # where, not a product: a padded token's NaN must not reach the sums.
            logsumexp_sq_T = torch.where(mask_T, logsumexp_sq_T, 0.0)
            entropy_T = torch.where(mask_T, entropy_T, 0.0)
            routes = routes * mask_T[:, None]
        counts_GE = torch.zeros(scopes, experts, dtype=torch.int64, device=entropy_T.device)
        counts_GE.scatter_add_(1, expert_ids_TK.view(scopes, -1), routes.view(scopes, -1))
        balance_sum = ((counts_GE * rows.prob_sum_GE).sum(-1) / tokens_G.clamp(min=1)).sum() * (experts / config.top_k)
        z_sum = logsumexp_sq_T.sum()
        aux_loss = config.balance_loss_coeff * balance_sum + (config.router_z_loss_coeff * z_sum).float()
        stats = RoutingStats(
            counts_GE.sum(0),
            rows.prob_sum_GE.sum(0).detach(),
            entropy_T.sum(),
            z_sum.detach(),
            balance_sum.detach(),
            tokens_G.sum(),
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
