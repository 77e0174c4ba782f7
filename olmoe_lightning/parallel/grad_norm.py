"""Norms that stay exact enough for millions of elements, and finite while the elements are."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 2048
_LEAST_FACTOR = 1e-30  # normal numbers of fp32 end at 1e-38
_PART = 2**20  # elements of which there are fp64 copies at a time
LEAST_SQUARES = 1e-20
"""A sum of squares below this one may lack elements whose squares vanish in fp32 (they are below 1e-19 each)."""


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


def peak(tensor: Tensor) -> Tensor:
    """Largest magnitude, fp64 []; infinite if an element is not finite, 0 of no elements."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    largest: Tensor = torch.linalg.vector_norm(tensor.detach(), float("inf")).double()
    # A maximum over processes need not let NaN through.
    return largest.nan_to_num(nan=float("inf"), posinf=float("inf"))


def sum_of_scaled_squares(tensor: Tensor, scale: Tensor) -> Tensor:
    """Sum of the squares of all elements divided by ``scale``, fp64 []; of elements whose squares fp32 cannot hold.

    Args:
        tensor: as in :func:`sum_of_squares`.
        scale: fp64 [], positive.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for part in tensor.detach().view(-1).split(_PART):
        total += (part.double() / scale).square().sum()
    return total


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of this global norm down to ``max_norm``; as ``torch.nn.utils.clip_grad_norm_``."""
    return min(max_norm / (norm + 1e-6), 1.0)


def factors(scale: float) -> list[float]:
    """Numbers that multiply to ``scale``, none so small that fp32 holds only its first digits."""
    return (
        [scale] if scale > _LEAST_FACTOR else [_LEAST_FACTOR, *factors(scale / _LEAST_FACTOR)] if scale > 0 else [0.0]
    )
