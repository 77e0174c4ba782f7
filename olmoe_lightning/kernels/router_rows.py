"""What the router reads off its logits: chosen scores, sums of probabilities, logsumexp and entropy of each token.

Composed of tensor operations this is a dozen passes over [T, E] and back, which is what a model with many experts pays
for them; the kernel takes one pass each way.

T tokens, K chosen experts, E experts, G scopes of T/G consecutive tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from olmoe_lightning.kernels.choice import on_cpu
from olmoe_lightning.kernels.cpu.native import call, threads


class RouterRows(NamedTuple):
    """The results of :func:`router_rows`."""

    expert_ids_TK: Tensor
    """int64: as they were chosen."""
    scores_TK: Tensor
    """fp32, differentiable: scores of the chosen experts."""
    prob_sum_GE: Tensor
    """fp32, differentiable: sum of the normalised scores over the tokens of each scope that count."""
    logsumexp_T: Tensor
    """fp32, differentiable: of the logits."""
    entropy_T: Tensor
    """fp32: of the normalised scores, in nats."""
    logits_TK: Tensor
    """fp32, differentiable: logits of the chosen experts."""


def router_rows(
    logits_TE: Tensor, choose: Callable[[Tensor], Tensor], mask_T: Tensor | None, scopes: int, sigmoid: bool = False
) -> RouterRows:
    """Scores of the logits, a choice by them, and what losses and statistics need.

    Args:
        logits_TE: fp32 [T, E].
        choose: from detached scores [T, E] to int64 [T, K], different experts for each token.
        mask_T: bool [T], tokens that count in ``prob_sum_GE`` (all when ``None``); no value of the others, NaN
            included, reaches it.
        scopes: G, a divisor of T.
        sigmoid: scores are sigmoids, normalised for the sums and the entropy; else they are the softmax.

    Returns:
        The choice, and what goes with it.

    Raises:
        ValueError: the scopes do not divide the tokens, or the mask is not one of these tokens.
    """
    if scopes < 1 or len(logits_TE) % scopes:
        raise ValueError(f"{len(logits_TE)} tokens cannot be divided into {scopes} scopes of the same length")
    if mask_T is not None and (mask_T.dtype != torch.bool or mask_T.shape != logits_TE.shape[:1]):
        raise ValueError(
            f"the mask of {len(logits_TE)} tokens must be bool [{len(logits_TE)}], "
            f"got {mask_T.dtype} {list(mask_T.shape)}"
        )
    if not sigmoid and on_cpu(logits_TE):
        return RouterRows(*_SoftmaxRows.apply(logits_TE, choose, mask_T, scopes))
    return router_rows_reference(logits_TE, choose, mask_T, scopes, sigmoid)


def router_rows_reference(
    logits_TE: Tensor, choose: Callable[[Tensor], Tensor], mask_T: Tensor | None, scopes: int, sigmoid: bool
) -> RouterRows:
    """The definition in tensor operations."""
    if sigmoid:
        logsumexp_T = torch.logsumexp(logits_TE, dim=-1)
        scores_TE = torch.sigmoid(logits_TE)
        # Normalised as logarithms: scores may all be as good as zero, and what is added to make a division safe is then
        # all that is left of them, so that the balance loss of any choice would be that of perfect balance.
        probs_TE = torch.softmax(F.logsigmoid(logits_TE), dim=-1)
    else:
        scores_TE = probs_TE = torch.softmax(logits_TE, dim=-1)
        logsumexp_T = _LogSumExp.apply(logits_TE, probs_TE.detach())
    entropy_T = torch.special.entr(probs_TE.detach()).sum(-1)
    expert_ids_TK = choose(scores_TE.detach())
    if mask_T is not None:
        # where, not a product: a padded token's NaN must not reach the sums.
        probs_TE = torch.where(mask_T[:, None], probs_TE, 0.0)
    prob_sum_GE = probs_TE.view(scopes, -1, probs_TE.shape[-1]).sum(1)
    scores_TK, logits_TK = scores_TE.gather(1, expert_ids_TK), logits_TE.gather(1, expert_ids_TK)
    return RouterRows(expert_ids_TK, scores_TK, prob_sum_GE, logsumexp_T, entropy_T, logits_TK)


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


class _SoftmaxRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, choose: Callable[[Tensor], Tensor], mask: Tensor | None, scopes: int
    ) -> tuple[Tensor, ...]:
        logits, mask = logits.contiguous(), None if mask is None else mask.contiguous()
        tokens, experts = logits.shape
        probs, prob_sum = torch.empty_like(logits), logits.new_empty(scopes, experts)
        logsumexp, entropy = logits.new_empty(tokens), logits.new_empty(tokens)
        results = (probs, logsumexp, entropy, prob_sum)
        call("router_rows_forward", logits, mask, tokens, experts, scopes, *results, threads())
        expert_ids = choose(probs)
        if len(expert_ids) != tokens:
            raise ValueError(f"experts of {len(expert_ids)} tokens were chosen, there are {tokens} tokens")
        chosen = probs.gather(1, expert_ids)  # checks that the experts exist
        ctx.save_for_backward(probs, expert_ids, mask)
        ctx.mark_non_differentiable(expert_ids, entropy)
        return expert_ids, chosen, prob_sum, logsumexp, entropy, logits.gather(1, expert_ids)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        _: Tensor,
        grad_chosen: Tensor,
        grad_prob_sum: Tensor,
        grad_logsumexp: Tensor,
        __: Tensor,
        grad_chosen_logits: Tensor,
    ) -> tuple[Tensor, None, None, None]:
        probs, expert_ids, mask = ctx.saved_tensors
        grads = [grad.contiguous() for grad in (grad_chosen, grad_prob_sum, grad_logsumexp)]
        expert_ids, grad_logits = expert_ids.contiguous(), torch.empty_like(probs)
        sizes = (*probs.shape, len(grad_prob_sum), expert_ids.shape[1])
        call("router_rows_backward", probs, expert_ids, mask, *grads, *sizes, grad_logits, threads())
        return grad_logits.scatter_add_(1, expert_ids, grad_chosen_logits), None, None, None
