"""Softmax cross entropy of rows of logits, with the gradient written over them.

N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from olmoe_lightning.kernels.choice import on_cpu
from olmoe_lightning.kernels.cpu.native import call, threads


def cross_entropy_rows_(
    logits_NV: Tensor, labels_N: Tensor, ignore_index: int, z_coeff: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Loss of each row; the logits are overwritten.

    Args:
        logits_NV: fp32 [N, V]. With ``with_grad`` it becomes the gradient of ``sum(loss + z_coeff * lse^2)`` over the
            counted rows; without, its content is undefined afterwards.
        labels_N: int64 [N].
        ignore_index: label of a row that does not count.
        z_coeff: of the z-loss.
        with_grad: whether the gradient is wanted.

    Returns:
        fp32 [N] cross entropy in nats (0 where ignored), fp32 [N] logsumexp of every row.

    Raises:
        IndexError: a label is no token of the vocabulary (on the CPU, where no check on the device would find it).
    """
    if on_cpu(logits_NV) and logits_NV.is_contiguous():
        _check_labels(labels_N, ignore_index, logits_NV.shape[1])
        loss, lse = logits_NV.new_empty(len(labels_N)), logits_NV.new_empty(len(labels_N))
        labels_N = labels_N.long().contiguous()
        call(
            "cross_entropy_rows", logits_NV, labels_N, len(labels_N), logits_NV.shape[1], ignore_index, float(z_coeff),
            with_grad, loss, lse, threads(),
        )  # fmt: skip
        return loss, lse
    counted = labels_N != ignore_index
    target = labels_N.where(counted, 0)[:, None]
    top = logits_NV.amax(dim=-1, keepdim=True)
    below = (top - logits_NV.gather(1, target))[:, 0]
    total = logits_NV.sub_(top).exp_().sum(-1)
    log_total = total.log()
    # Of large logits only differences are exact: what is small is never read off the logsumexp.
    lse = top[:, 0] + log_total
    loss = torch.where(counted, log_total + below, 0.0)
    if with_grad:  # softmax · s - onehot, s = 1 + 2 · z_coeff · lse; ignored: 0
        logits_NV.mul_(((1 + 2 * z_coeff * lse) / total)[:, None]).masked_fill_(~counted[:, None], 0.0)
        logits_NV.scatter_add_(1, target, -counted.to(logits_NV.dtype)[:, None])
    return loss, lse


def _check_labels(labels_N: Tensor, ignore_index: int, vocab: int) -> None:
    wrong = ((labels_N < 0) | (labels_N >= vocab)) & (labels_N != ignore_index)
    if wrong.any():
        raise IndexError(
            f"label {labels_N[wrong][0].item()} is outside of the vocabulary of {vocab} tokens "
            f"({ignore_index} marks a position to ignore)"
        )
