"""How tokens reach the experts: the contract that every transport keeps, and the transport inside one process.

T tokens, K chosen experts, R rows, E experts, D model width.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol

from torch import Tensor
from typing_extensions import TypeVar

from olmoe_lightning.kernels.permute import combine_rows, dispatch_rows, plan_permutation
from olmoe_lightning.kernels.routes import Permutation

HandleT = TypeVar("HandleT", default=Any)
"""What a transport must remember of a dispatch to combine its rows."""


class Dispatched(NamedTuple, Generic[HandleT]):
    """Rows as they arrive at the experts."""

    rows_RD: Tensor
    """[R, D], sorted by local expert."""
    row_weights_R: Tensor
    """fp32 [R]."""
    offsets_E: Tensor
    """int32 [E_local], end of each expert's rows."""
    handle: HandleT
    """Given back to ``combine``."""


class Transport(Protocol[HandleT]):
    """How tokens reach the experts and return; differentiable both ways."""

    fallbacks: int
    """F: how many experts after the chosen ones ``dispatch`` wants to know of each token. If it is not 0, ``dispatch``
    is also given ``fallback_ids_TF``, int64 [T, F], the next experts of each token's ranking."""

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched[HandleT]:
        """Send each token to its experts."""

    def combine(self, rows_RD: Tensor, handle: HandleT) -> Tensor:
        """Bring the experts' rows back and sum them per token, [T, D]."""


class LocalTransport:
    """All experts are in this process: a permutation and its inverse.

    Args:
        num_experts: E.
    """

    fallbacks: int = 0

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched[Permutation]:
        """Sort the routes by expert."""
        plan = plan_permutation(expert_ids_TK, self.num_experts)
        row_weights = weights_TK.reshape(-1).index_select(0, plan.route_of_row_R)
        return Dispatched(dispatch_rows(x_TD, plan), row_weights, plan.offsets_E, plan)

    def combine(self, rows_RD: Tensor, handle: Permutation) -> Tensor:
        """Sum the rows of each token."""
        return combine_rows(rows_RD, handle)
