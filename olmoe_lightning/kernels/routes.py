"""Where the row of each route stands: in one process, or in the memory of the process that has its expert.

T tokens, K chosen experts, R = T*K rows, E experts, D model width, C rows that fit.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Permutation(NamedTuple):
    """Where each of the T*K routes stands among the rows sorted by expert."""

    token_of_row_R: Tensor
    """int64 [R]: the token whose copy row r is."""
    route_of_row_R: Tensor
    """int64 [R]: index of the route in the flattened [T, K]."""
    row_of_route_TK: Tensor
    """int64 [T, K]: the inverse."""
    offsets_E: Tensor
    """int32 [E]: end of each expert's rows."""


class Routes(NamedTuple):
    """The place of each route's row in the memory of several processes."""

    rank_TK: Tensor
    """int32 [T, K]: the process that has the expert."""
    row_TK: Tensor
    """int32 [T, K]: the row there; -1 for a route that is dropped."""


class Window(NamedTuple):
    """Rows in one process' memory, and one row more, into which the reference writes what is dropped."""

    rows: Tensor
    """[C + 1, D]."""
    weights: Tensor
    """fp32 [C + 1]."""
