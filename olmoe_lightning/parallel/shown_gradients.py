"""Gradients at the module's parameters, where something of the user's looks at them between backward pass and update.

The buckets' buffers have room for all gradients anyway: what other processes reduced is gathered into them, and
``parameter.grad`` is a view. So a change in place is a change of what the optimizer takes; a gradient that was replaced
or removed is taken over. Where processes change theirs in different ways, that of the one that updates an element
counts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from olmoe_lightning._torch import foreach_mul_
from olmoe_lightning.parallel.buffers import Bucket
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer


class ShownGradients:
    """Puts gradients where hooks look for them, and takes back what they made of them.

    Args:
        sharded: whose gradients.
    """

    def __init__(self, sharded: ShardedOptimizer) -> None:
        self.sharded = sharded
        self._taken: list[tuple[dict[str, Any], list[nn.Parameter]]] = []  # groups, and the shards that are theirs

    def show_own(self, scale: Tensor) -> None:
        """Before the last batch of a step: what this process has so far, times ``scale`` (fp32 [])."""
        for group in self.sharded.groups:
            group.show_own(scale)

    def take_own(self, scale: Tensor) -> None:
        """The reverse, with what became of it."""
        for group in self.sharded.groups:
            group.take_own(scale)

    def show(self) -> None:
        """The gradients of the step as the optimizer is to take them, of all processes; collective.

        The optimizer's groups hold the module's parameters meanwhile.
        """
        for bucket in self.sharded.buckets:
            bucket.start_show()
        for bucket in self.sharded.buckets:
            bucket.show(self.sharded.used)
        groups = self.sharded.optimizer.param_groups
        for group, parameters in zip(groups, self.sharded.parameters_of_groups, strict=False):
            self._taken.append((group, group["params"]))
            group["params"] = list(parameters)

    def take(self) -> None:
        """Give the shards what became of the gradients."""
        for bucket in self.sharded.buckets:
            bucket.take()

    def end(self) -> None:
        """The optimizer's groups hold their shards again; the gradients stay to be looked at."""
        for group, shards in self._taken:
            group["params"] = shards
        self._taken = []

    def scale(self, factor: float) -> None:
        """Multiply all that is shown."""
        foreach_mul_(self._tensors(), factor)

    def clamp(self, limit: float) -> None:
        """Bring every element into ``[-limit, limit]``."""
        for tensor in self._tensors():
            tensor.clamp_(-limit, limit)

    def partial_storages(self) -> set[int]:
        """Addresses of gradients of which this process has only a part: of experts, and of stages all."""
        mesh, ownership = self.sharded.mesh, self.sharded.ownership
        return {
            parameter.grad.untyped_storage().data_ptr()
            for _, parameter, _ in self.sharded.parameters
            if parameter.grad is not None
            and (mesh.pipeline.size > 1 or (mesh.expert.size > 1 and ownership.is_expert(parameter)))
        }

    def _tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for group in self.sharded.groups:
            if isinstance(group, Bucket):
                found.append(group.grads)
            else:
                found += [parameter.grad for _, parameter, _ in group.parameters if parameter.grad is not None]
        return found
