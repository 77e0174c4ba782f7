"""Sums of squares that stay exact enough for millions of elements."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 2048


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Sum of the squares of all elements, fp64 [].

    Rows of 2048 are summed in fp32 and their sums in fp64: a single fp32 accumulator over 10^8 squares would be wrong
    in the fifth digit. NaN and infinities come through.

    Args:
        tensor: fp32, contiguous, any shape.
    """
    flat = tensor.detach().view(-1)
    whole = flat.numel() // _ROW * _ROW
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    if whole:
        total += torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1).double().square().sum()
    if whole < flat.numel():
        total += torch.linalg.vector_norm(flat[whole:]).double().square()
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings a gradient of this global norm down to ``max_norm``; as ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
