"""Weights that may still be on their way: each layer waits for its own when its forward pass begins.

The unit of waiting is a member of a ``ModuleList`` or ``Sequential`` (a block): its weights are used inside of its
forward pass. Everything else is waited for before the step. A unit whose weights got a gradient although none of its
modules was called uses them in another way; it is waited for before the step from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from olmoe_lightning.parallel.buffers import Bucket


class _Unit:
    def __init__(self, module: nn.Module, buckets: list[Bucket]) -> None:
        self.module = module
        self.buckets = buckets
        self.called = False

    def wait(self, *_: Any) -> None:
        self.called = True
        for bucket in self.buckets:
            bucket.finish_gather()


class WeightWaits:
    """Hooks that wait for gathered weights.

    Args:
        module: the whole model.
        bucket_of: the bucket of each parameter that travels.
    """

    def __init__(self, module: nn.Module, bucket_of: Mapping[nn.Parameter, Bucket]) -> None:
        self._hooks: list[Any] = []
        self.units: list[_Unit] = []
        self._early: list[Bucket] = []
        self._proven = False
        covered: set[nn.Parameter] = set()
        claimed: set[nn.Module] = set()
        for parent in module.modules():
            if not isinstance(parent, nn.ModuleList | nn.Sequential) or parent in claimed:
                continue
            for child in parent:
                inside = set(child.modules())
                claimed |= inside
                parameters = [parameter for parameter in child.parameters() if parameter in bucket_of]
                if not parameters:
                    continue
                covered.update(parameters)
                unit = _Unit(child, _unique(bucket_of[parameter] for parameter in parameters))
                self.units.append(unit)
                self._hooks += [part.register_forward_pre_hook(unit.wait) for part in inside]
        self._early = _unique(bucket for parameter, bucket in bucket_of.items() if parameter not in covered)

    def begin_forward(self) -> None:
        """Wait for what no unit waits for; in the first step, for everything."""
        for bucket in self._early:
            bucket.finish_gather()
        if not self._proven:
            for unit in self.units:
                unit.called = False
                for bucket in unit.buckets:
                    bucket.finish_gather()

    def end_backward(self) -> None:
        """After the first backward pass: units that were not called move to the early ones."""
        if self._proven:
            return
        self._proven = True
        for unit in [unit for unit in self.units if not unit.called]:
            self.units.remove(unit)
            self._early = _unique([*self._early, *unit.buckets])

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _unique(buckets: Any) -> list[Bucket]:
    return list({id(bucket): bucket for bucket in buckets}.values())
