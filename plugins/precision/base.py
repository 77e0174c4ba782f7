"""What a precision plugin with narrow weights and the strategy know of each other."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class NarrowWeights(Protocol):
    """A precision plugin that computes with weights narrower than the fp32 masters that the optimizer updates."""

    param_dtype: torch.dtype
    """Of the weights and of the rows that travel between experts."""


@runtime_checkable
class KeepsMasters(Protocol):
    """A strategy whose optimizer updates fp32 masters, and which back-propagates sums over tokens."""

    backpropagates_sums: bool


def weight_dtype(precision: Any) -> torch.dtype | None:
    """The dtype that a precision plugin gives the weights; ``None`` if it leaves them as they are."""
    return precision.param_dtype if isinstance(precision, NarrowWeights) else None
