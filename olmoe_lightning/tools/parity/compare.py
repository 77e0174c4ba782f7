"""Two runs side by side: for every quantity the largest deviation, what would be acceptable, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from olmoe_lightning.tools.parity.record import RankRecord, RunRecord

Tensors = Mapping[str, Tensor]

_MEAN_BOUND = 5e-3  # also in bfloat16: a mean of many values is more exact than each of them
GROUPS = ("embedding", "attention", "router", "experts", "shared", "norms", "head")


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    quantity: str
    absolute: float
    """Largest absolute deviation."""
    relative: float
    """The same over the largest magnitude in the reference; see :func:`compare`."""
    bound: float
    """Largest relative deviation that is accepted."""

    @property
    def ok(self) -> bool:
        """Whether it is within the bound; NaN is not."""
        return self.relative <= self.bound

    @property
    def verdict(self) -> str:
        """``equal`` to the last bit, ``ok``, or ``DEVIATES``."""
        return "DEVIATES" if not self.ok else "ok" if self.absolute else "equal"


def compare(reference: RunRecord, other: RunRecord, bound: float) -> list[Row]:
    """Every quantity of two runs.

    Tensors are compared by group: the largest deviation of any element in any step, over the largest magnitude that the
    group has in the reference in that step. So a group of small gradients (the norms') is not hidden by one of large
    ones (the head's), while an element near zero need not be right in its last digit.

    Args:
        reference: of one process.
        other: of the topology.
        bound: largest relative deviation accepted for what depends on the order of sums (at most 5e-3 for losses and
            the norm). What does not (the choice of experts, learning rates, replicas among each other) must be equal.

    Returns:
        Rows in the order of a step: losses, gradients, parameters, optimizer, replicas.
    """
    steps = list(zip(reference.steps, other.steps, strict=False))
    rows = [_row("optimizer steps", 0, [(_numbers([len(reference.steps)]), _numbers([len(other.steps)]))])]
    for name in sorted({name for pair in steps for step in pair for name in step.losses}):
        losses = [[_numbers([step.losses.get(name, math.nan)]) for step in pair] for pair in steps]
        rows.append(_row(name, min(bound, _MEAN_BOUND), losses))
    norms = [[_numbers([step.grad_norm]) for step in pair] for pair in steps]
    rows.append(_row("gradient norm", min(bound, _MEAN_BOUND), norms))
    rows.append(_row("expert load", 0, [[{"": step.expert_load} for step in pair] for pair in steps]))
    for group in GROUPS:
        gradients = [[_members(step.gradients, group) for step in pair] for pair in steps]
        rows.append(_row(f"gradients: {group}", bound, gradients))
    for group in GROUPS:
        parameters = [_members(run.parameters, group) for run in (reference, other)]
        rows.append(_row(f"parameters: {group}", bound, [parameters]))
    for kind in sorted({*reference.state, *other.state}):
        whole = [run.state.get(kind, {}) for run in (reference, other)]
        groups = [[_members(tensors, group) for tensors in whole] for group in GROUPS]
        rows.append(_row(f"optimizer: {kind}", bound, groups))
    rows.append(_row("selection bias", bound, [(reference.biases, other.biases)]))
    rates = [[{name: torch.tensor(rate) for name, rate in step.learning_rates.items()} for step in p] for p in steps]
    rows.append(_row("learning rates", 0, rates))
    rows.append(_row("skipped steps", 0, [[_numbers([step.skipped_steps]) for step in pair] for pair in steps]))
    unequal = sum(a != b for a, b in zip(reference.options, other.options, strict=False))
    unequal += abs(len(reference.options) - len(other.options))
    rows.append(_row("optimizer's groups", 0, [(_numbers([0]), _numbers([unequal]))]))
    return [row for row in (*rows, *compare_ranks(other.ranks)) if row is not None]


def compare_ranks(ranks: Sequence[RankRecord]) -> list[Row]:
    """Processes of one run with each other: replicas are equal to the last bit, and so is what is logged."""
    if len(ranks) < 2:
        return []

    def part(rank: RankRecord, experts: bool) -> Tensors:
        return {name: value for name, value in rank.weights.items() if (name in rank.expert_names) == experts}

    of_stages = {rank.pipeline_rank: rank for rank in reversed(ranks)}
    of_experts = {(rank.pipeline_rank, rank.expert_rank): rank for rank in reversed(ranks)}
    dense = [(part(of_stages[rank.pipeline_rank], False), part(rank, False)) for rank in ranks]
    experts = [(part(of_experts[rank.pipeline_rank, rank.expert_rank], True), part(rank, True)) for rank in ranks]
    metrics = [
        (
            {name: torch.tensor(value) for name, value in a.items()},
            {name: torch.tensor(value) for name, value in b.items()},
        )
        for rank in ranks
        for a, b in zip(ranks[0].metrics, rank.metrics, strict=True)
    ]
    rows = [
        _row("replicas: dense weights", 0, dense),
        _row("replicas: experts", 0, experts),
        _row("ranks: logged metrics", 0, metrics),
    ]
    return [row for row in rows if row is not None]


def format_table(rows: Sequence[Row]) -> str:
    """The rows as text, one line each."""
    width = max(len(row.quantity) for row in rows)
    lines = [f"{'quantity':{width}}  {'absolute':>9}  {'relative':>9}  {'bound':>7}  verdict"]
    for row in rows:
        bound = f"{row.bound:7.0e}" if row.bound else "  equal"
        lines.append(f"{row.quantity:{width}}  {row.absolute:9.1e}  {row.relative:9.1e}  {bound}  {row.verdict}")
    return "\n".join(lines)


def group_of(name: str) -> str:
    """The group of a parameter, one of :data:`GROUPS`."""
    parts = name.split(".")
    for group, part in (("router", "router"), ("experts", "experts"), ("shared", "shared"), ("head", "head")):
        if part in parts:
            return group
    if any(part.endswith("norm") for part in parts):
        return "norms"
    return "embedding" if "embed" in parts else "attention"


def _members(tensors: Tensors, group: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if group_of(name) == group}


def _numbers(values: Sequence[float]) -> Tensors:
    return {"": torch.tensor(values, dtype=torch.float64)}


def _row(quantity: str, bound: float, pairs: Iterable[Sequence[Tensors]]) -> Row | None:
    """The worst of pairs (reference, other), each scaled by its own reference; ``None`` if there is nothing in them."""
    absolute = relative = 0.0
    found = False
    for reference, other in pairs:
        found = found or bool(reference or other)
        deviation, scale = 0.0, 0.0
        for name in {*reference, *other}:
            a, b = reference.get(name), other.get(name)
            if a is None or b is None or a.shape != b.shape:
                deviation = math.inf  # one of them lacks it
                continue
            difference = (a.double() - b.double()).abs().max().item()
            deviation = max(deviation, math.inf if math.isnan(difference) else difference)
            scale = max(scale, a.double().abs().max().item())
        absolute = max(absolute, deviation)
        # A group without any gradient must have none in the other run either.
        relative = max(relative, deviation / scale if scale else math.inf if deviation else 0.0)
    return Row(quantity, absolute, relative, bound) if found else None
