"""What a pipeline schedule does when: its actions, played through with a duration for each; idle time, activations.

Letters: P pipeline ranks, V stages per rank, M microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.pipeline.stages import PIPELINE_SCHEDULES, find_pipeline_schedule

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """One computation of one stage on one microbatch."""

    stage: int
    kind: Kind
    """``F`` forward, ``B`` whole backward; or ``I`` gradients of inputs and, later, ``W`` gradients of weights."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Table = tuple[tuple[tuple[Action, ...], ...], ...]
"""For each rank, its steps in order. A step is one action; or two that run one after the other, and whose results leave
for other ranks only when both are done (DualPipeV's pairs of forward and backward)."""


@dataclass(frozen=True)
class Durations:
    """How long actions take, in units of the forward pass of a stage of mean size.

    The default backward takes twice the forward, half of it for each kind of gradient: so it is where matrix products
    are everything. Recomputing the forward in the backward adds 1 to ``backward_input``.

    Stage 0 has no input that needs a gradient. PyTorch does nothing at its ``I``, and its whole backward at its ``W``.

    Args:
        forward: of one microbatch through one stage.
        backward_input: gradients of the stage's input.
        backward_weight: gradients of its weights.
        transfer: until a result that left one rank is at the next.

    Raises:
        UserError: a duration is negative or not finite, or all computation takes no time.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "transfer"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise UserError(f"{name} ({value}) must be a finite number, at least 0")
        if self.forward == 0:
            raise UserError("forward (0) must be positive")

    def of(self, action: Action) -> float:
        """Duration of an action on a stage of mean size."""
        whole = self.backward_input + self.backward_weight
        if action.stage == 0:
            return {"F": self.forward, "B": whole, "I": 0.0, "W": whole}[action.kind]
        parts = {"F": self.forward, "B": whole, "I": self.backward_input, "W": self.backward_weight}
        return parts[action.kind]


@dataclass(frozen=True)
class Timed:
    """An action, where and when."""

    action: Action
    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One optimizer step's worth of microbatches through the pipeline."""

    schedule: str
    stages_per_rank: int
    num_microbatches: int
    actions: tuple[Timed, ...]
    """By start, then rank."""
    makespan: float
    """When the last rank is done."""
    idle: tuple[float, ...]
    """Of each rank, the fraction of the makespan in which it computes nothing."""
    activation_peaks: tuple[int, ...]
    """Of each rank, the most activations of one microbatch in one of its stages that are alive at once: from the start
    of the forward to the end of the backward, of ``W`` where it is split. With V stages, each has 1/V of the layers."""

    @property
    def pipeline_size(self) -> int:
        """P."""
        return len(self.idle)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time that is idle."""
        return sum(self.idle) / len(self.idle)

    @property
    def microbatches_in_memory(self) -> tuple[float, ...]:
        """The peaks in microbatches of all of a rank's layers, and so comparable between schedules: peaks / V."""
        return tuple(peak / self.stages_per_rank for peak in self.activation_peaks)

    def to_text(self, indent: str = "") -> str:
        """The timeline in characters: a line per rank and stage, a column per time unit (several if actions are short).

        A digit is a forward pass, a lower-case letter a backward pass or gradients of inputs, an upper-case letter
        gradients of weights; 0, a and A are microbatch 0, and after 9, j and J they start again. A dot is a rank
        that waits.
        """
        shortest = min(timed.end - timed.start for timed in self.actions if timed.end > timed.start)
        columns_per_unit = min(4, max(1, math.ceil(1 / shortest - 1e-9)))
        width = round(self.makespan * columns_per_unit)
        rows: dict[tuple[int, int], list[str]] = {}
        busy = [[False] * width for _ in self.idle]
        for timed in self.actions:
            row = rows.setdefault((timed.rank, timed.action.stage), [" "] * width)
            # A column shows what runs at its middle, so that every action of a column's length or more is seen.
            first, end = (math.ceil(at * columns_per_unit - 0.5 - 1e-9) for at in (timed.start, timed.end))
            for column in range(first, min(end, width)):
                row[column] = _character(timed.action)
                busy[timed.rank][column] = True
        lines = []
        for (rank, stage), row in sorted(rows.items()):
            label = f"rank {rank:<{len(str(self.pipeline_size - 1))}}"
            if self.stages_per_rank > 1:
                label += f" stage {stage:<{len(str(len(rows) - 1))}}"
            cells = (cell if busy[rank][column] else "." for column, cell in enumerate(row))
            lines.append(f"{indent}{label} {''.join(cells)}".rstrip())
        return "\n".join(lines)


def _character(action: Action) -> str:
    if action.kind == "F":
        return str(action.microbatch % 10)
    return chr((ord("A") if action.kind == "W" else ord("a")) + action.microbatch % 10)


def action_table(schedule: str, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> Table:
    """The computations of each rank in the order in which PyTorch's class runs them.

    Args:
        schedule: a name in :data:`~olmoe_lightning.parallel.pipeline.stages.PIPELINE_SCHEDULES`.
        pipeline_size: P.
        stages_per_rank: V.
        num_microbatches: M.

    Raises:
        UserError: the schedule cannot run with these numbers.
    """
    found = find_pipeline_schedule(schedule)
    found.check(pipeline_size, stages_per_rank, num_microbatches)
    if found.name == "gpipe":
        rows = [_gpipe_row(rank, num_microbatches) for rank in range(pipeline_size)]
    elif found.name == "1f1b":
        rows = [_one_f_one_b_row(rank, pipeline_size, num_microbatches) for rank in range(pipeline_size)]
    else:
        return torch_action_table(schedule, pipeline_size, stages_per_rank, num_microbatches)
    return tuple(tuple((action,) for action in row) for row in rows)


def torch_action_table(schedule: str, pipeline_size: int, stages_per_rank: int, num_microbatches: int) -> Table:
    """The table that PyTorch's class of a schedule has made for itself. No processes are needed for that.

    Only here is the inside of that class looked at. The classes with one stage per rank do not run from their table,
    and in PyTorch 2.13 that of ``Schedule1F1B`` is not what it runs, so :func:`action_table` does not ask them.

    Returns:
        The steps of each rank. A pair of forward and backward is one step.
    """
    stages = [
        SimpleNamespace(num_stages=pipeline_size * stages_per_rank, group_size=pipeline_size, group_rank=0, submod=None)
        for _ in range(stages_per_rank)
    ]
    made = PIPELINE_SCHEDULES[schedule].torch_class()(stages, num_microbatches)
    table = []
    for rank in range(pipeline_size):
        steps = [step.sub_actions or (step,) for step in made.pipeline_order[rank] if step is not None]
        table.append(
            tuple(
                tuple(Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in step)
                for step in steps
            )
        )
    return tuple(table)


def _gpipe_row(rank: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards, both in order."""
    return [Action(rank, kind, m) for kind in ("F", "B") for m in range(num_microbatches)]


def _one_f_one_b_row(rank: int, pipeline_size: int, num_microbatches: int) -> list[Action]:
    """P - rank forwards, so that the first backward can come back; then a backward and a forward in turn."""
    ahead = min(num_microbatches, pipeline_size - rank)
    row = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(num_microbatches):
        row.append(Action(rank, "B", m))
        if m + ahead < num_microbatches:
            row.append(Action(rank, "F", m + ahead))
    return row


def simulate(
    schedule: str,
    pipeline_size: int,
    stages_per_rank: int,
    num_microbatches: int,
    durations: Durations | None = None,
    stage_costs: Sequence[float] | None = None,
) -> Timeline:
    """Play a schedule through: every rank does its actions in order, each as soon as what it needs has arrived.

    Args:
        schedule: a name in :data:`~olmoe_lightning.parallel.pipeline.stages.PIPELINE_SCHEDULES`.
        pipeline_size: P.
        stages_per_rank: V.
        num_microbatches: M.
        durations: of the actions on a stage of mean size.
        stage_costs: of the P x V stages, in any unit; an action takes longer in a more expensive stage.
            Equal if not given.

    Raises:
        UserError: the schedule cannot run with these numbers, or the costs do not fit.
    """
    table = action_table(schedule, pipeline_size, stages_per_rank, num_microbatches)
    num_stages = pipeline_size * stages_per_rank
    costs = [1.0] * num_stages if stage_costs is None else list(stage_costs)
    if len(costs) != num_stages or min(costs) <= 0:
        raise UserError(f"stage_costs {costs} must be {num_stages} positive numbers")
    mean = sum(costs) / num_stages
    timed = _play(table, durations or Durations(), [cost / mean for cost in costs])
    makespan = max(each.end for each in timed)
    busy = [sum(each.end - each.start for each in timed if each.rank == rank) for rank in range(pipeline_size)]
    return Timeline(
        schedule,
        stages_per_rank,
        num_microbatches,
        tuple(sorted(timed, key=lambda each: (each.start, each.rank, each.end))),
        makespan,
        tuple(1.0 - each / makespan for each in busy),
        tuple(_activation_peak(row) for row in table),
    )


def _play(table: Table, durations: Durations, sizes: Sequence[float]) -> list[Timed]:
    """Start and end of every action, each rank's in order."""
    last_stage = len(sizes) - 1
    rank_of = {action.stage: rank for rank, row in enumerate(table) for step in row for action in step}
    done: dict[Action, float] = {}  # the end of an action, for its own rank
    arrived: dict[Action, float] = {}  # when its result is at other ranks
    clock = [0.0] * len(table)
    waiting = [_flat(row) for row in table]
    following = [next(row, None) for row in waiting]
    timed: list[Timed] = []

    def ready(action: Action) -> float | None:
        """When all that an action needs is there; ``None`` while that is not known."""
        times = [0.0]
        for alternatives in _needs(action, last_stage):
            known = done if rank_of[alternatives[0].stage] == rank_of[action.stage] else arrived
            found = [known[each] for each in alternatives if each in known]
            if not found:
                return None
            times += found
        return max(times)

    progress = True
    while progress:
        progress = False
        for rank in range(len(table)):
            while (current := following[rank]) is not None and (when := ready(current[0])) is not None:
                action, step = current
                start = max(when, clock[rank])
                clock[rank] = done[action] = start + durations.of(action) * sizes[action.stage]
                timed.append(Timed(action, rank, start, clock[rank]))
                if action == step[-1]:
                    arrived.update((each, clock[rank] + durations.transfer) for each in step)
                following[rank] = next(waiting[rank], None)
                progress = True
    stuck = [f"rank {rank} at {current[0]}" for rank, current in enumerate(following) if current is not None]
    if stuck:
        raise UserError(f"the table of actions waits for itself: {', '.join(stuck)}")
    return timed


def _flat(row: Sequence[tuple[Action, ...]]) -> Iterator[tuple[Action, tuple[Action, ...]]]:
    """Each action of a rank, with the step that it belongs to."""
    return ((action, step) for step in row for action in step)


def _needs(action: Action, last_stage: int) -> list[tuple[Action, ...]]:
    """What must have happened before an action; of the actions in one tuple a table has one."""
    stage, m = action.stage, action.microbatch
    if action.kind == "F":
        return [(Action(stage - 1, "F", m),)] if stage else []
    if action.kind == "W":
        return [(Action(stage, "I", m),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, "F", m),)]
    if stage < last_stage:
        needs.append((Action(stage + 1, "B", m), Action(stage + 1, "I", m)))
    return needs


def _activation_peak(row: Sequence[tuple[Action, ...]]) -> int:
    alive = peak = 0
    for action, _ in _flat(row):
        if action.kind == "F":
            alive += 1
            peak = max(peak, alive)
        elif action.kind in ("B", "W"):
            alive -= 1
    return peak
