"""What the backward pass of a loss will do, read off its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node

from olmoe_lightning._torch import gradient_dtypes
from olmoe_lightning.model.losses import ATTACHED

NARROW = (torch.bfloat16, torch.float16)
_STRUCTURE = (
    *("Mean", "Sum", "ToCopy", "Div", "Mul", "Add", "Sub", "Neg"),
    *("View", "Expand", "Squeeze", "Unsqueeze", "Select", "Stack"),
)
"""Beginnings of the names of nodes through which the gradient of a loss comes as a number that many elements share."""


def passes_narrow(loss: Tensor) -> bool:
    """Whether the gradient of a loss is rounded to less than fp32 before it meets the first values of a batch."""
    nodes = _nodes(loss, lambda node: node.name().startswith(_STRUCTURE))
    return any(dtype in NARROW for node in nodes for dtype in gradient_dtypes(node))


def attaches_losses(loss: Tensor) -> bool:
    """Whether layers attached losses of their own on the way to a loss, which join its backward pass as sums."""
    return any(node.name() == ATTACHED for node in _nodes(loss, lambda node: True))


def _nodes(loss: Tensor, passes: Callable[[Node], bool]) -> Iterator[Node]:
    """Each node of the graph once, as far as they pass a gradient on."""
    ahead, seen = [loss.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if passes(node):
            ahead += [following for following, _ in node.next_functions]
