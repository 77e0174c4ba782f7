"""Autocast for our own products: torch casts the operands of its own only."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def cast_operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a matrix product in autocast's dtype if it is active on their device, else as they are."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in tensors)


def no_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which torch computes in the operands' own dtype on that tensor's device."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
