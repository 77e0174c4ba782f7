"""State that each process has for itself: random numbers, the position of its data loader, extra state of its modules.

On the same mesh each process gets its own back. On another one the random numbers are new and reproducible, a loader's
state goes to the same data rank if there are as many of them, and extra state is the first process' unless it belongs
to experts, which go where they are; what follows no rule is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olmoe_lightning.errors import UserError, shortened
from olmoe_lightning.parallel.layout import flattened, is_dense
from olmoe_lightning.parallel.mesh import Mesh, MeshShape


@dataclass
class OwnState:
    """Of one process."""

    random: dict[str, Any]
    """States of its random number generators."""
    loaders: list[Any] = field(default_factory=list)
    """States of its training data loaders, if they have any."""
    other: dict[str, Any] = field(default_factory=dict)
    """What its module puts into the ``state_dict`` besides parameters and buffers."""
    of_experts: list[str] = field(default_factory=list)
    """Names in ``other`` that belong to its experts."""


@dataclass(frozen=True)
class OwnStates:
    """Of all processes, in the order of their ranks, as a checkpoint has it; what is the same on all is there once.

    Args:
        random: of each process.
        loaders: of each process; empty if all have the same.
        other: what several processes name is the first one's.
        own_other: of each process what differs from ``other``; empty if nothing does.
        of_experts: names in ``other`` that belong to experts.
    """

    random: Sequence[dict[str, Any]] = ()
    loaders: Sequence[list[Any]] = ()
    other: Mapping[str, Any] = field(default_factory=dict)
    own_other: Sequence[Mapping[str, Any]] = ()
    of_experts: Sequence[str] = ()

    @classmethod
    def of(cls, ranks: Sequence[OwnState]) -> OwnStates:
        """Put those of all processes together."""
        other: dict[str, Any] = {}
        for rank in ranks:
            for name, value in rank.other.items():
                other.setdefault(name, value)
        differs = [
            {name: value for name, value in rank.other.items() if not equal(value, other[name])} for rank in ranks
        ]
        same = all(equal(rank.loaders, ranks[0].loaders) for rank in ranks)
        return cls(
            [rank.random for rank in ranks],
            [] if same else [rank.loaders for rank in ranks],
            other,
            differs if any(differs) else [],
            sorted({name for rank in ranks for name in rank.of_experts}),
        )

    def random_of(self, mesh: Mesh, topology: Mapping[str, int]) -> dict[str, Any] | None:
        """The generators of a process; ``None`` if the checkpoint is of another mesh."""
        same = len(self.random) == mesh.world.size and asdict(mesh.shape) == dict(topology)
        return self.random[mesh.rank] if same else None

    def loaders_of(self, mesh: Mesh, topology: Mapping[str, int]) -> list[Any] | None:
        """The loaders of a process; ``None`` if all have the same.

        Raises:
            UserError: they differ, and there are other data ranks than there were.
        """
        if not self.loaders:
            return None
        saved = MeshShape(**topology)
        if saved.data != mesh.data.size:
            raise UserError(
                f"the data loaders of the checkpoint's {saved.data} data ranks have states of their own, which say "
                f"nothing of the {mesh.data.size} data ranks of this run; go on with as many, or give the loader a "
                "state that is the same on all ranks"
            )
        return self.loaders[mesh.data.rank]  # the stages of a pipeline read the same samples

    def other_of(self, mesh: Mesh, topology: Mapping[str, int]) -> dict[str, Any]:
        """The extra state for the module of a process.

        Raises:
            UserError: some belongs to experts that were spread in another way.
        """
        other = dict(self.other)
        if not self.own_other:
            return other
        saved = MeshShape(**topology)
        if asdict(mesh.shape) == dict(topology):
            return {**other, **self.own_other[mesh.rank]}
        names = [name for name in self.of_experts if any(name in rank for rank in self.own_other)]
        if names and saved.expert != mesh.expert.size:
            raise UserError(
                f"{shortened(names, 3)} of the checkpoint is extra state of experts on {saved.expert} ranks, each its "
                f"own, and cannot be shared out among {mesh.expert.size}; go on with "
                f"expert_parallel_size={saved.expert}, or keep such state in buffers with a row for each expert"
            )
        for name in names:
            for rank, own in enumerate(self.own_other):
                if saved.coordinates(rank)[2] == mesh.expert.rank and name in own:
                    other[name] = own[name]
                    break
        return other


def equal(left: Any, right: Any) -> bool:
    """Whether two values of a state are the same, whatever they are made of."""
    if left is right:
        return True
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor) and is_dense(left) and is_dense(right)
        if not both or left.dtype != right.dtype or left.shape != right.shape:
            return False
        return torch.equal(flattened(left).view(torch.uint8), flattened(right).view(torch.uint8))  # NaN is NaN
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return type(left) is type(right) and left.dtype == right.dtype and np.array_equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)
