"""Arithmetic on timings: medians with spread, ratios of paired rounds, and who goes first in which round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

Side = TypeVar("Side")


@dataclass(frozen=True)
class Summary:
    """A sample of one figure, one value per round.

    Args:
        median: of the sample.
        q1: lower quartile.
        q3: upper quartile.
        low: smallest value.
        high: largest value.
        rounds: the values themselves, in the order they were measured.
    """

    median: float
    q1: float
    q3: float
    low: float
    high: float
    rounds: tuple[float, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def summarize(values: Sequence[float]) -> Summary:
    """Median, quartiles (by linear interpolation, the ends included) and extremes.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("there is nothing to summarize: 0 rounds were measured")
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Summary(statistics.median(values), quartiles[0], quartiles[2], min(values), max(values), tuple(values))


def paired_ratios(values: Sequence[float], reference: Sequence[float]) -> Summary:
    """Summary of ``values[r] / reference[r]``: both sides of a round ran seconds apart, so slow drift cancels.

    Raises:
        ValueError: the two have different numbers of rounds.
    """
    if len(values) != len(reference):
        raise ValueError(f"ratios need pairs, got {len(values)} and {len(reference)} rounds")
    return summarize([value / other for value, other in zip(values, reference, strict=True)])


def turn_order(sides: Sequence[Side], index: int) -> list[Side]:
    """The order of the sides in a round: rotated by one each time, so that all go first equally often."""
    shift = index % len(sides)
    return [*sides[shift:], *sides[:shift]]
