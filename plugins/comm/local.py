"""All experts are in this process: nothing is sent. The oracle of every other plugin."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from olmoe_lightning.kernels import Dispatched, LocalTransport, Permutation
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.base import CommPlugin, CommSpec, check_setup, not_set_up


class LocalComm(LocalTransport, CommPlugin[Permutation]):
    """The transport inside one process as a plugin."""

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        super().__init__(num_experts=0)

    @classmethod
    @override
    def unavailable(cls, axis_size: int, device: torch.device) -> str | None:
        """It reaches no other process."""
        if axis_size > 1:
            return f"it reaches only experts of its own process, but {axis_size} processes share them"
        return None

    @override
    def setup(self, axis: Axis, spec: CommSpec) -> None:
        """Take all experts."""
        check_setup(self, axis, spec, instead="all_to_all")
        self.num_experts = spec.num_experts

    @override
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched[Permutation]:
        """Sort the routes by expert."""
        if not self.num_experts:
            raise not_set_up(self)
        return super().dispatch(x_TD, expert_ids_TK, weights_TK)

    @override
    def teardown(self) -> None:
        """Forget the experts."""
        self.num_experts = 0
