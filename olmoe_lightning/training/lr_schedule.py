"""Learning-rate schedules as plain functions of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from olmoe_lightning.errors import UserError

LRSchedule = Literal["cosine", "wsd", "constant"]


def make_lr_schedule(
    kind: LRSchedule, warmup_steps: int, total_steps: int | None, min_ratio: float, decay_fraction: float
) -> Callable[[int], float]:
    """The factor on the base learning rate at a step (0 is the first).

    All schedules warm up linearly; the first step already has ``1 / warmup_steps``. Then ``cosine`` falls to
    ``min_ratio`` at ``total_steps``, ``wsd`` stays at 1 and falls linearly to it over the last ``decay_fraction`` of
    the steps, ``constant`` stays. Past ``total_steps`` the last value holds.

    Args:
        kind: which one.
        warmup_steps: optimizer steps of the warm-up; 0 for none.
        total_steps: optimizer steps of the whole run; may be ``None`` for ``constant``.
        min_ratio: final factor, 0 to 1.
        decay_fraction: share of the run in which ``wsd`` decays, 0 to 1.

    Raises:
        UserError: a number is out of range, or the warm-up is longer than the run.
    """
    if kind not in get_args(LRSchedule):
        raise UserError(f"schedule ({kind!r}) must be one of {', '.join(map(repr, get_args(LRSchedule)))}")
    if warmup_steps < 0:
        raise UserError(f"warmup_steps ({warmup_steps}) must not be negative")
    if not 0 <= min_ratio <= 1:
        raise UserError(f"min_lr_ratio ({min_ratio}) must lie between 0 and 1")
    if not 0 <= decay_fraction <= 1:
        raise UserError(f"decay_fraction ({decay_fraction}) must lie between 0 and 1")
    if kind == "constant":
        return lambda step: _warmup(step, warmup_steps)
    if total_steps is None:
        raise UserError(f"the {kind!r} schedule needs to know its length: set trainer.max_steps or schedule_steps")
    if total_steps < 1:
        raise UserError(f"the schedule's length ({total_steps} steps) must be at least 1")
    if warmup_steps > total_steps:
        raise UserError(f"the warm-up ({warmup_steps} steps) is longer than the schedule ({total_steps} steps)")
    # An own name: the narrowed type of an argument is lost inside the closures below.
    last = total_steps
    start = warmup_steps if kind == "cosine" else max(warmup_steps, last - round(decay_fraction * last))

    def factor(step: int) -> float:
        if step < start:
            return _warmup(step, warmup_steps)
        progress = min(1.0, (step - start) / max(1, last - start))
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
        return min_ratio + (1 - min_ratio) * shape

    return factor


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
