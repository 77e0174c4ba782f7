"""All experts are in this process: nothing is sent. The oracle of every other plugin."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from olmoe_lightning.errors import UserError
from olmoe_lightning.kernels import Dispatched, LocalTransport
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.base import CommPlugin, CommSpec


class LocalComm(CommPlugin):
    """A permutation of the rows and its inverse."""

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        self._transport: LocalTransport | None = None

    @classmethod
    def unavailable(cls, axis_size: int, device: torch.device) -> str | None:
        """It reaches no other process."""
        if axis_size > 1:
            return f"it reaches only experts of its own process, but {axis_size} processes share them"
        return None

    def setup(self, axis: Axis, spec: CommSpec) -> None:
        """Take all experts."""
        if reason := self.unavailable(axis.size, spec.device):
            raise UserError(f"comm {self.name!r} cannot serve axis {axis.name!r}: {reason}; take 'all_to_all'")
        self._transport = LocalTransport(spec.num_experts)

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Sort the routes by expert."""
        if self._transport is None:
            raise RuntimeError(f"comm {self.name!r}: setup() comes before dispatch()")
        return self._transport.dispatch(x_TD, expert_ids_TK, weights_TK)

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Sum the rows of each token."""
        if self._transport is None:
            raise RuntimeError(f"comm {self.name!r}: setup() comes before combine()")
        return self._transport.combine(rows_RD, handle)

    def teardown(self) -> None:
        """Forget the experts."""
        self._transport = None
