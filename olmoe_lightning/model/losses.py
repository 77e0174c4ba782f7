"""Losses: next-token cross entropy over a large vocabulary, and how a layer's own loss joins the backward pass.

N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from olmoe_lightning.kernels import cast_operands, cross_entropy_rows_

IGNORE_INDEX = -100
"""Label of a position that does not count: padding, or the last token of a document."""

_CHUNK_ELEMENTS = 2**22
"""Logits held at a time: 16 MiB in fp32, which stays in a CPU's cache and is still a large matrix product."""


class LossSums(NamedTuple):
    """Sums over the labels that count; divide by their number once, at the end."""

    total: Tensor
    """fp32 []: cross entropy plus the weighted z-loss; the one that is differentiable."""
    cross_entropy_N: Tensor
    """fp32 [N]: of each token, in nats; 0 where the label is ignored."""
    z: Tensor
    """fp64 []: sum of logsumexp(logits)^2, without its coefficient; the squares may be beyond fp32."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and cross entropy in one, chunk by chunk.

    The full logits never exist, and their gradient is taken while the chunk is in the cache: each logit is read and
    written a few times instead of a dozen.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, z_coeff: float, needs_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = max(1, _CHUNK_ELEMENTS // weight_VD.shape[0])
        cross_entropy_N = torch.empty(x_ND.shape[0], dtype=torch.float32, device=x_ND.device)
        z_sum = torch.zeros((), dtype=torch.float64, device=x_ND.device)
        grad_x = torch.empty_like(x_ND) if needs_grad else None
        grad_w = torch.zeros(weight_VD.shape, dtype=torch.float32, device=x_ND.device) if needs_grad else None
        for start in range(0, x_ND.shape[0], rows):
            chunk = slice(start, start + rows)
            x, labels = x_ND[chunk], labels_N[chunk]
            logits = F.linear(x, weight_VD).float()
            cross_entropy_N[chunk], logsumexp = cross_entropy_rows_(logits, labels, IGNORE_INDEX, z_coeff, needs_grad)
            z_sum += torch.where(labels != IGNORE_INDEX, logsumexp.double().square(), 0.0).sum()
            if grad_x is None or grad_w is None:
                continue
            grad = logits.to(x.dtype)
            torch.mm(grad, weight_VD, out=grad_x[chunk])
            if grad.dtype == torch.float32:
                grad_w.addmm_(grad.t(), x)
            else:
                grad_w += grad.t() @ x
        ctx.save_for_backward(grad_x, grad_w)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(cross_entropy_N, z_sum)
        total = cross_entropy_N.sum(dtype=torch.float64)
        return (total + z_coeff * z_sum if z_coeff else total).float(), cross_entropy_N, z_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad_total.to(grad_x.dtype), (grad_w * grad_total).to(ctx.weight_dtype), None, None, None


def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, z_coeff: float = 0.0) -> LossSums:
    """Cross entropy of ``softmax(x @ weight.T)`` against the labels, with an optional z-loss of the logits.

    Args:
        x_ND: [N, D], the final hidden states.
        weight_VD: [V, D], the head.
        labels_N: int64 [N], :data:`IGNORE_INDEX` where nothing is predicted.
        z_coeff: coefficient of ``logsumexp(logits)^2``.

    Returns:
        Sums over the tokens, whatever the dtype of the operands.
    """
    x_ND, weight_VD = cast_operands(x_ND, weight_VD)
    needs_grad = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    return LossSums(*_LinearCrossEntropy.apply(x_ND, weight_VD, labels_N, z_coeff, needs_grad))


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad_x, scale, None


ATTACHED = "_AttachLossBackward"
"""Name of the node that attaches a loss, in a backward pass."""


def attach_loss(x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """``x`` unchanged; when its gradient is taken, ``loss`` receives the gradient ``scale``.

    A layer's auxiliary loss is so back-propagated exactly once wherever the layer runs: inside a pipeline stage that
    never sees the final loss, under recompute, under accumulation.

    Args:
        x: any tensor on the path to the final loss.
        loss: fp32 [], a sum over tokens.
        scale: fp32 [], what the main loss sum is multiplied by (1 for sums, 1/tokens for a mean).
    """
    return _AttachLoss.apply(x, loss, scale)
