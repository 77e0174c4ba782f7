"""What a communication plugin is: four methods that bring tokens to the experts of other processes and back.

T tokens, K chosen experts, E experts of all processes, D model width, R rows received.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic

import torch
from torch import Tensor

from olmoe_lightning.errors import UserError
from olmoe_lightning.kernels.transport import Dispatched, HandleT
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

    @property
    def sizes(self) -> tuple[int, ...]:
        """num_experts, top_k, d_model and the bytes of a value: what all processes of an axis must agree on."""
        return (self.num_experts, self.top_k, self.d_model, self.dtype.itemsize)


class CommPlugin(ABC, Generic[HandleT]):
    """Moves tokens to the processes that hold their experts, and what the experts made of them back.

    Process r of the axis holds the experts [r * E_local, (r + 1) * E_local), E_local = E / axis.size. One instance
    serves all MoE layers whose spec is equal: several dispatches may be under way before the first of them is combined
    or differentiated, so that whatever belongs to one of them lies in its handle.

    Every process issues the same collectives in the same order, forward and backward, whatever it sends or receives:
    a process without tokens, or whose experts get none, takes part like the others. ``conformance.py`` checks all this.

    The type of the handle may be named, ``CommPlugin[MyHandle]``; without a name it is ``Any``.
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
            UserError: it cannot serve this axis or spec; the message has the numbers.
        """

    @abstractmethod
    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched[HandleT]:
        """Send each token to its experts; differentiable with respect to tokens and weights.

        Args:
            x_TD: [T, D]; T may differ between processes and be zero.
            expert_ids_TK: int64 [T, K], global ids.
            weights_TK: fp32 [T, K].

        Returns:
            The rows this process' experts received, sorted by local expert, within an expert by source process, then by
            token; their fp32 weights; the ends of the local experts' rows. Rows behind the last end are padding.
        """

    @abstractmethod
    def combine(self, rows_RD: Tensor, handle: HandleT) -> Tensor:
        """Bring rows back and sum them per token; differentiable. The weights were applied inside the experts.

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


def check_setup(plugin: CommPlugin, axis: Axis, spec: CommSpec, instead: str | None = None) -> int:
    """What every plugin checks in ``setup``, on this process.

    Args:
        plugin: to be set up.
        axis: as in ``setup``.
        spec: as in ``setup``.
        instead: name of a plugin to take where this one cannot be used.

    Returns:
        E_local.

    Raises:
        UserError: the plugin cannot serve this axis, or the experts cannot be shared out equally.
    """
    where = describe(axis)
    if reason := plugin.unavailable(axis.size, spec.device):
        advice = f"; take {instead!r}" if instead else ""
        raise UserError(f"comm {plugin.name!r} cannot serve {where}: {reason}{advice}")
    if spec.num_experts % axis.size:
        raise UserError(
            f"comm {plugin.name!r} on {where}: num_experts ({spec.num_experts}) must be divisible by the number of "
            f"processes that share them ({axis.size})"
        )
    if axis.size > 1 and axis.group is None:
        raise UserError(f"comm {plugin.name!r} needs a process group, but {where} has none")
    return spec.num_experts // axis.size


def check_same_sizes(plugin: CommPlugin, axis: Axis, spec: CommSpec, sizes_by_rank: Sequence[tuple[int, ...]]) -> None:
    """Compare what the processes of an axis were set up with.

    Args:
        plugin: that is set up.
        axis: the processes.
        spec: of this process.
        sizes_by_rank: :attr:`CommSpec.sizes` of all of them.

    Raises:
        UserError: on all processes, when they differ.
    """
    if len(set(sizes_by_rank)) > 1:
        raise UserError(
            f"comm {plugin.name!r}: the processes of axis {axis.name!r} differ in (num_experts, top_k, d_model, bytes "
            f"per value): rank {axis.rank} has {list(spec.sizes)}, all have {list(map(list, sizes_by_rank))}"
        )


def not_set_up(plugin: CommPlugin) -> RuntimeError:
    """The error of a plugin that is used before ``setup``."""
    return RuntimeError(f"comm {plugin.name!r}: setup() comes before dispatch()")


@contextlib.contextmanager
def named_exchange(name: str, axis: Axis, what: str, errors: type[RuntimeError] = RuntimeError) -> Iterator[None]:
    """Inside, an exchange that fails says which one it was, and where.

    Args:
        name: of the plugin.
        axis: the processes.
        what: is exchanged.
        errors: those that mean that an exchange failed.
    """
    try:
        yield
    except errors as error:
        raise RuntimeError(
            f"comm {name!r} on {describe(axis)}: the exchange of {what} failed; most often because another "
            f"process of the axis (global ranks {list(axis.ranks)}) has ended or does something else: {error}"
        ) from error


def describe(axis: Axis) -> str:
    """Where a process stands on an axis, for errors."""
    return f"axis {axis.name!r}, rank {axis.rank} of {axis.size}"


def check_operands(where: str, spec: CommSpec, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Compare a dispatch with the spec.

    Raises:
        UserError: a shape differs; the message has all of them.
    """
    wanted = [(len(x_TD), spec.d_model), (len(x_TD), spec.top_k), (len(x_TD), spec.top_k)]
    found = [tuple(tensor.shape) for tensor in (x_TD, expert_ids_TK, weights_TK)]
    if found != wanted:
        raise UserError(f"dispatch on {where}: tokens, expert ids and weights of shapes {wanted} expected, got {found}")
