"""Which layers a process has: the schedules and what each demands, and the one map of layers to stages to ranks.

Letters: L layers, P pipeline ranks, V stages per rank, M microbatches.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal

from olmoe_lightning.errors import UserError

Placement = Literal["loop", "v"]
MicrobatchRule = Literal["any", "stages", "rounds"]


@dataclass(frozen=True)
class PipelineSchedule:
    """One schedule of ``torch.distributed.pipelining`` and its conditions; a test holds them against the real class."""

    name: str
    torch_name: str
    placement: Placement
    """``loop``: stage s is on rank s mod P. ``v``: every other turn runs backwards, so that rank 0 has both ends."""
    stages_per_rank: int
    """The default V."""
    fixed_stages: bool
    """Whether no other V is possible; otherwise the default is the smallest."""
    splits_backward: bool
    """Whether gradients of inputs and of weights are computed apart, where that fills the bubble."""
    microbatches: MicrobatchRule
    """``any``; ``stages``: at least P x V; ``rounds``: a multiple of max(1, M // P)."""

    def torch_class(self) -> Any:
        """The class that runs it; imported here alone, as it takes its time."""
        from torch.distributed import pipelining

        return getattr(pipelining, self.torch_name)

    def build(self, stages: Sequence[Any], num_microbatches: int, loss: Callable[..., Any]) -> Any:
        """PyTorch's schedule over the stages of one rank. Gradients of microbatches add up, they are not averaged.

        Args:
            stages: this rank's ``PipelineStage`` objects, ascending.
            num_microbatches: M.
            loss: of the last stage's output and its part of the target.
        """
        several = self.stages_per_rank > 1  # such classes take a list, the others a stage
        return self.torch_class()(stages if several else stages[0], num_microbatches, loss_fn=loss, scale_grads=False)

    def accepts(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> bool:
        """Whether M microbatches can run on P x V stages."""
        if self.microbatches == "stages":
            return num_microbatches >= pipeline_size * stages_per_rank
        if self.microbatches == "rounds":
            return num_microbatches >= 1 and num_microbatches % max(1, num_microbatches // pipeline_size) == 0
        return num_microbatches >= 1

    def check(self, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> None:
        """Refuse numbers with which the schedule cannot run.

        Raises:
            UserError: names the number, and what it could be.
        """
        for name, value in (
            ("pipeline_parallel_size", pipeline_size),
            ("stages_per_rank", stages_per_rank),
            ("num_microbatches", num_microbatches),
        ):
            if value < 1:
                raise UserError(f"{name} ({value}) must be at least 1")
        exactly = self.fixed_stages and stages_per_rank != self.stages_per_rank
        if exactly or stages_per_rank < self.stages_per_rank:
            raise UserError(
                f"schedule {self.name!r} has {'exactly' if self.fixed_stages else 'at least'} {self.stages_per_rank} "
                f"stage{'s' if self.stages_per_rank > 1 else ''} per rank, not stages_per_rank ({stages_per_rank})"
            )
        if self.accepts(pipeline_size, stages_per_rank, num_microbatches):
            return
        stages = pipeline_size * stages_per_rank
        if self.microbatches == "stages":
            raise UserError(
                f"schedule {self.name!r} needs num_microbatches ({num_microbatches}) to be at least the number of "
                f"stages, pipeline_parallel_size ({pipeline_size}) x stages_per_rank ({stages_per_rank}) = {stages}"
            )
        fewer, more = (
            next(m for m in candidates if self.accepts(pipeline_size, stages_per_rank, m))
            for candidates in (range(num_microbatches, 0, -1), range(num_microbatches, 2 * num_microbatches + stages))
        )
        raise UserError(
            f"schedule {self.name!r} needs num_microbatches ({num_microbatches}) to be a multiple of its rounds, "
            f"num_microbatches // pipeline_parallel_size ({pipeline_size}) = {num_microbatches // pipeline_size}; "
            f"{fewer} and {more} are the nearest"
        )


PIPELINE_SCHEDULES: dict[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("gpipe", "ScheduleGPipe", "loop", 1, True, False, "any"),
        PipelineSchedule("1f1b", "Schedule1F1B", "loop", 1, True, False, "stages"),
        PipelineSchedule("interleaved_1f1b", "ScheduleInterleaved1F1B", "loop", 2, False, False, "rounds"),
        PipelineSchedule("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", "loop", 2, False, True, "rounds"),
        PipelineSchedule("zbv_zero_bubble", "ScheduleZBVZeroBubble", "v", 2, True, True, "any"),
        PipelineSchedule("dualpipev", "ScheduleDualPipeV", "v", 2, True, True, "stages"),
    )
}
"""Every schedule that trains, by the name that users give."""


def find_pipeline_schedule(name: str) -> PipelineSchedule:
    """The schedule of a name.

    Raises:
        UserError: there is none; the message has the closest name and all of them.
    """
    if name not in PIPELINE_SCHEDULES:
        begun = [known for known in PIPELINE_SCHEDULES if name and known.startswith(name.lower())]
        close = begun or difflib.get_close_matches(name.lower(), PIPELINE_SCHEDULES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"unknown schedule {name!r}{hint}; the schedules are {', '.join(PIPELINE_SCHEDULES)}")
    return PIPELINE_SCHEDULES[name]


@dataclass(frozen=True)
class StageMap:
    """Layers of each stage and stages of each rank: the only place that knows them.

    The embedding goes with stage 0, final norm and head with the last stage. :func:`make_stage_map` checks what the
    schedule demands of V and M; here every layer is in exactly one stage, whoever makes the map.

    Raises:
        UserError: the number of stages is not P x V, a stage is empty, or the ranges do not follow each other from 0.
    """

    pipeline_schedule: str
    pipeline_size: int
    stages_per_rank: int
    layers: tuple[range, ...]
    """Global layer indices of each stage, in the order of the stages."""

    def __post_init__(self) -> None:
        stages = self.pipeline_size * self.stages_per_rank
        if len(self.layers) != stages:
            raise UserError(
                f"{len(self.layers)} ranges of layers for pipeline_parallel_size ({self.pipeline_size}) x "
                f"stages_per_rank ({self.stages_per_rank}) = {stages} stages"
            )
        expected = 0
        for stage, owned in enumerate(self.layers):
            if owned.start != expected or owned.step != 1 or not owned:
                raise UserError(
                    f"stage {stage} must have at least one layer and start at layer {expected}; it is {owned}"
                )
            expected = owned.stop

    @property
    def num_stages(self) -> int:
        """P x V."""
        return len(self.layers)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.layers[-1].stop

    @property
    def first_rank(self) -> int:
        """Where stage 0, and so the embedding, is: pipeline rank 0 in every placement."""
        return self.rank_of(0)

    @property
    def last_rank(self) -> int:
        """Where the last stage, and so the loss, is: the last rank in a loop, rank 0 in a V."""
        return self.rank_of(self.num_stages - 1)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank of a stage.

        Raises:
            UserError: there is no such stage.
        """
        if not 0 <= stage < self.num_stages:
            raise UserError(f"there is no stage {stage}; there are {self.num_stages}")
        turn, position = divmod(stage, self.pipeline_size)
        backwards = PIPELINE_SCHEDULES[self.pipeline_schedule].placement == "v" and turn % 2 == 1
        return self.pipeline_size - 1 - position if backwards else position

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The V stages of a pipeline rank, ascending.

        Raises:
            UserError: there is no such rank.
        """
        if not 0 <= rank < self.pipeline_size:
            raise UserError(f"there is no pipeline rank {rank}; there are {self.pipeline_size}")
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """Global indices of all layers of a pipeline rank, ascending."""
        return tuple(layer for stage in self.stages_of(rank) for layer in self.layers[stage])

    def __str__(self) -> str:
        """One line per rank, for people."""
        cells = [
            [f"stage {stage}: {self._contents(stage)}" for stage in self.stages_of(rank)]
            for rank in range(self.pipeline_size)
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        counts = f"{self.num_layers} layers in {self.num_stages} stages on {self.pipeline_size} ranks"
        lines = [f"{self.pipeline_schedule}: {counts}"]
        for rank, row in enumerate(cells):
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"rank {rank:<{len(str(self.pipeline_size - 1))}} | {' | '.join(padded)}".rstrip())
        return "\n".join(lines)

    def _contents(self, stage: int) -> str:
        owned = self.layers[stage]
        parts = [f"layers {owned[0]}-{owned[-1]}" if len(owned) > 1 else f"layer {owned[0]}"]
        if stage == 0:
            parts.insert(0, "embedding")
        if stage == self.num_stages - 1:
            parts.append("head")
        return ", ".join(parts)


def make_stage_map(
    schedule: str,
    pipeline_size: int,
    stages_per_rank: int | None,
    num_layers: int,
    num_microbatches: int,
    *,
    layer_costs: Sequence[float] | None = None,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    split: Sequence[int] | None = None,
) -> StageMap:
    """The stage map of a run, checked against all that its schedule demands.

    Args:
        schedule: a name in :data:`PIPELINE_SCHEDULES`.
        pipeline_size: P.
        stages_per_rank: V; ``None`` for the schedule's default.
        num_layers: L.
        num_microbatches: M.
        layer_costs: as :func:`split_layers` takes them.
        first_cost: of the embedding.
        last_cost: of final norm and head.
        split: layers of each of the P x V stages, instead of the even split.

    Raises:
        UserError: unknown schedule; V or M that it cannot run with; fewer layers than stages; costs or a split that
            do not fit. The message has the numbers.
    """
    found = find_pipeline_schedule(schedule)
    per_rank = found.stages_per_rank if stages_per_rank is None else stages_per_rank
    found.check(pipeline_size, per_rank, num_microbatches)
    stages = pipeline_size * per_rank
    if num_layers < stages:
        raise UserError(
            f"num_layers ({num_layers}) must be at least the number of stages, pipeline_parallel_size "
            f"({pipeline_size}) x stages_per_rank ({per_rank}) = {stages}"
        )
    if split is None:
        layers = split_layers(num_layers, stages, layer_costs, first_cost, last_cost)
    else:
        sizes = list(split)
        if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != num_layers:
            raise UserError(
                f"split {sizes} must have {stages} numbers of layers (pipeline_parallel_size {pipeline_size} x "
                f"stages_per_rank {per_rank}), each at least 1, with sum {num_layers}; it has {len(sizes)} with sum "
                f"{sum(sizes)}"
            )
        ends = list(accumulate(sizes, initial=0))
        layers = tuple(map(range, ends[:-1], ends[1:]))
    return StageMap(schedule, pipeline_size, per_rank, layers)


def split_layers(
    num_layers: int,
    num_stages: int,
    layer_costs: Sequence[float] | None = None,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
) -> tuple[range, ...]:
    """Cut the layers into contiguous stages of at least one layer, so that the bottleneck is as cheap as possible.

    The bottleneck, the most expensive stage, sets the pace of the pipeline. Among the splits with the same one, the
    most even is taken (the smallest sum of squared costs), and among those the one whose earlier stages have fewer
    layers, because they keep the activations of the most microbatches. Costs are compared exactly, so that the answer
    is the same everywhere.

    Args:
        num_layers: L.
        num_stages: of the whole pipeline.
        layer_costs: of each layer, in any unit; 1 each if not given.
        first_cost: what stage 0 does besides its layers, in the same unit (embedding).
        last_cost: what the last stage does besides its layers (final norm, head and loss).

    Raises:
        UserError: fewer layers than stages, not one cost per layer, or a cost that is negative or not finite.
    """
    costs = [1.0] * num_layers if layer_costs is None else list(layer_costs)
    if not 1 <= num_stages <= num_layers:
        raise UserError(f"{num_layers} layers cannot be split into {num_stages} stages of at least one layer")
    if len(costs) != num_layers:
        raise UserError(f"there are {len(costs)} layer costs for {num_layers} layers")
    named = {f"layer_costs[{layer}]": cost for layer, cost in enumerate(costs)}
    for name, value in (named | {"first_cost": first_cost, "last_cost": last_cost}).items():
        if not math.isfinite(value) or value < 0:
            raise UserError(f"{name} ({value}) must be a finite number, at least 0")
    *whole, first, last = _whole_numbers([*costs, first_cost, last_cost])
    before = list(accumulate(whole, initial=0))

    def cost(stage: int, start: int, end: int) -> int:
        ends = (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0)
        return before[end] - before[start] + ends

    bottleneck = _best_ends(num_layers, num_stages, lambda *stage, rest: max(cost(*stage), rest or 0))[0]
    assert bottleneck is not None
    limit = bottleneck  # not optional in the closure

    def squares(stage: int, start: int, end: int, rest: int | None) -> int | None:
        own = cost(stage, start, end)
        return None if own > limit or (rest is None and end < num_layers) else own * own + (rest or 0)

    _, ends = _best_ends(num_layers, num_stages, squares)
    return tuple(map(range, [0, *ends[:-1]], ends))


def stage_costs(
    layers: Sequence[range],
    layer_costs: Sequence[float] | None = None,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
) -> tuple[float, ...]:
    """Cost of each stage, in the unit and with the arguments of :func:`split_layers`."""
    costs = [
        float(len(owned)) if layer_costs is None else float(sum(layer_costs[i] for i in owned)) for owned in layers
    ]
    costs[0] += first_cost
    costs[-1] += last_cost
    return tuple(costs)


def _best_ends(num_layers: int, num_stages: int, worth: Callable[..., int | None]) -> tuple[int | None, list[int]]:
    """Dynamic programming from the last stage to the first.

    Args:
        num_layers: L.
        num_stages: S.
        worth: of (stage, start, end) and ``rest``, the best worth of what follows (``None`` after the last stage, or
            where nothing is allowed); ``None`` if not allowed.

    Returns:
        The smallest worth of the whole, and where each stage ends; the earliest end among equals.
    """
    best: list[int | None] = [None] * (num_layers + 1)  # of the stages after this one, by their first layer
    choices: list[list[int]] = []
    for stage in reversed(range(num_stages)):
        after = num_stages - 1 - stage
        new: list[int | None] = [None] * (num_layers + 1)
        chosen = [0] * (num_layers + 1)
        for start in range(stage, num_layers - after):
            for end in range(start + 1 if after else num_layers, num_layers - after + 1):
                value = worth(stage, start, end, rest=best[end])
                least = new[start]
                if value is not None and (least is None or value < least):
                    new[start], chosen[start] = value, end
        best = new
        choices.append(chosen)
    ends, start = [], 0
    for chosen in reversed(choices):
        start = chosen[start]
        ends.append(start)
    return best[0], ends


def _whole_numbers(values: Sequence[float]) -> list[int]:
    """The values times one factor, as exact integers: floats are fractions of a power of two."""
    exact = [Fraction(value) for value in values]
    factor = math.lcm(*(value.denominator for value in exact))
    return [int(value * factor) for value in exact]
