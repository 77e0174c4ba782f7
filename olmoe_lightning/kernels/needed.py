"""Which gradients a backward pass is after: a schedule that splits it asks for those of inputs and weights apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from olmoe_lightning._torch import will_execute_node


def not_leaf(weight: Tensor) -> Tensor:
    """The same values behind a node of the graph, as the engine does not tell of a leaf whether it is wanted."""
    if weight.is_leaf and weight.requires_grad and not torch.compiler.is_compiling():
        return weight.view_as(weight)
    return weight


def needed_grads(ctx: Any, count: int) -> tuple[bool, ...]:
    """Whether the gradient of each of the first ``count`` inputs is used by the backward pass that runs now.

    ``ctx.needs_input_grad`` was decided in the forward pass: it is true of a weight also while only the gradients of
    inputs are computed, and of an input while only those of weights are.

    Args:
        ctx: of an autograd function, in its ``backward``.
        count: of inputs, all of them tensors. Gradients of leaves are always computed, see :func:`not_leaf`.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad[:count]
    if torch.compiler.is_compiling():
        return needed
    edges = ctx.next_functions[:count]
    return tuple(need and _runs(node) for need, (node, _) in zip(needed, edges, strict=True))


def _runs(node: Any) -> bool:
    return "AccumulateGrad" in node.name() or will_execute_node(node)
