"""How tokens reach the experts: the contract every way of travelling keeps, and the way inside one process.

T tokens, K chosen experts, R rows, E experts, D model width.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from olmoe_lightning.kernels.permute import combine_rows, dispatch_rows, plan_permutation


class Dispatched(NamedTuple):
    """Rows as they arrive at the experts."""

    rows_RD: Tensor
    """[R, D], sorted by local expert."""
    row_weights_R: Tensor
    """fp32 [R]."""
    offsets_E: Tensor
    """int32 [E_local], end of each expert's rows."""
    handle: Any
    """Whatever the way back needs."""


class Transport(Protocol):
    """How tokens reach the experts and return; differentiable both ways."""

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Send each token to its experts."""

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Bring the experts' rows home and sum them per token, [T, D]."""


class LocalTransport:
    """All experts are in this process: a permutation and its inverse."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Sort the routes by expert."""
        plan = plan_permutation(expert_ids_TK, self.num_experts)
        row_weights = weights_TK.reshape(-1).index_select(0, plan.route_of_row_R)
        return Dispatched(dispatch_rows(x_TD, plan), row_weights, plan.offsets_E, plan)

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Sum the rows of each token."""
        return combine_rows(rows_RD, handle)
