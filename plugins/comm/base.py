"""What a communication plugin is: four methods that bring tokens to the experts of other processes and back.

T tokens, K chosen experts, E experts of all processes, D model width, R rows received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from olmoe_lightning.errors import UserError
from olmoe_lightning.kernels import Dispatched
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.capacity import DropCounters


@dataclass(frozen=True)
class CommSpec:
    """What will be sent; the same on every process of the axis.

    Args:
        num_experts: E, of all processes together.
        top_k: K.
        d_model: D.
        dtype: of the rows.
        device: of the rows.
        max_tokens: most tokens that a process ever dispatches at once; ``None`` when that is not known.
    """

    num_experts: int
    top_k: int
    d_model: int
    dtype: torch.dtype
    device: torch.device
    max_tokens: int | None = None


class CommPlugin(ABC):
    """Moves tokens to the processes that hold their experts, and what the experts made of them back.

    Process r of the axis holds the experts [r * E_local, (r + 1) * E_local), E_local = E / axis.size. One instance
    serves all MoE layers whose spec is equal: several dispatches may be under way before the first of them is combined
    or differentiated, so that whatever belongs to one of them lies in its handle.

    Every process issues the same collectives in the same order, forward and backward, whatever it sends or receives:
    a process without tokens, or whose experts get none, takes part like the others. ``conformance.py`` checks all this.
    """

    name: ClassVar[str]
    """What it is called in ``MoEStrategy(comm=...)``, in logs and errors."""

    fallbacks: int = 0
    """How many experts of each token's ranking, beyond the chosen ones, ``dispatch`` is given: not 0 only for a plugin
    that may send a route to another expert. It then takes ``fallback_ids_TF``, int64 [T, fallbacks], the best first."""

    @abstractmethod
    def setup(self, axis: Axis, spec: CommSpec) -> None:
        """Prepare for dispatches of this kind; collective over the axis. May be called again after ``teardown``.

        Args:
            axis: the processes that share the experts.
            spec: sizes and types.

        Raises:
            ValueError: it cannot serve this axis or spec; the message has the numbers.
        """

    @abstractmethod
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Send each token to its experts; differentiable with respect to tokens and weights.

        Args:
            x_TD: [T, D]; T may differ between processes and be zero.
            expert_ids_TK: int64 [T, K], global ids.
            weights_TK: fp32 [T, K].

        Returns:
            The rows this process' experts received, sorted by local expert, within an expert by source process, then by
            token; their fp32 weights; the ends of the local experts' rows. Rows behind the last end belong to nobody.
        """

    @abstractmethod
    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Bring rows home and sum them per token; differentiable. The weights were applied inside the experts.

        Args:
            rows_RD: [R, D], in the order of the dispatched rows.
            handle: of the dispatch.

        Returns:
            [T, D], zero for a token none of whose rows was sent.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Give back what ``setup`` took; calling it again, or without ``setup``, does nothing."""

    drops: DropCounters | None = None
    """What was dropped of this process' tokens, counted on the device; ``None`` while nothing can be dropped."""

    @classmethod
    def unavailable(cls, axis_size: int, device: torch.device) -> str | None:
        """Why this plugin cannot run with so many processes on such a device; ``None`` when it can."""
        return None


def experts_per_process(name: str, axis: Axis, spec: CommSpec) -> int:
    """E_local.

    Raises:
        ValueError: the experts cannot be shared out equally.
    """
    if spec.num_experts % axis.size:
        raise UserError(
            f"comm {name!r} on {describe(axis)}: num_experts ({spec.num_experts}) must be divisible by the number of "
            f"processes that share them ({axis.size})"
        )
    return spec.num_experts // axis.size


def describe(axis: Axis) -> str:
    """Where a process stands on an axis, for errors."""
    return f"axis {axis.name!r}, rank {axis.rank} of {axis.size}"


def check_operands(where: str, spec: CommSpec, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Compare a dispatch with the spec.

    Raises:
        ValueError: a shape differs; the message has all of them.
    """
    wanted = [(len(x_TD), spec.d_model), (len(x_TD), spec.top_k), (len(x_TD), spec.top_k)]
    found = [tuple(tensor.shape) for tensor in (x_TD, expert_ids_TK, weights_TK)]
    if found != wanted:
        raise UserError(f"dispatch on {where}: tokens, expert ids and weights of shapes {wanted} expected, got {found}")
