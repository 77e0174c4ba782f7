"""Which gradients a backward pass needs: pipeline schedules compute input and weight gradients in two passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from olmoe_lightning._torch import will_execute_node


def not_leaf(weight: Tensor) -> Tensor:
    """The same values behind a node of the graph: autograd does not say whether a leaf's gradient is needed."""
    if weight.is_leaf and weight.requires_grad and not torch.compiler.is_compiling():
        return weight.view_as(weight)
    return weight


def needed_grads(ctx: Any, count: int) -> tuple[bool, ...]:
    """Whether the gradient of each of the first ``count`` inputs is used by the backward pass that runs now.

    ``ctx.needs_input_grad`` was decided in the forward pass: it is true of a weight also in a pass for input gradients
    (dgrad), and of an input in a pass for weight gradients (wgrad).

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
