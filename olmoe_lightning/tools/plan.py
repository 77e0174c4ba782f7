"""``olmoe-lightning plan``: what a pipeline schedule would do with a model, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.pipeline.stages import StageMap, find_pipeline_schedule, make_stage_map, stage_costs
from olmoe_lightning.tools.timeline import Durations, Kind, Timeline, simulate

FORMATS = (".png", ".svg")
COLORS: dict[Kind, str] = {"F": "#4c78a8", "B": "#e4852a", "I": "#e4a33a", "W": "#5a9a54"}
IDLE = "#e8e8e8"
NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
_MOST_LABELS = 700  # a picture with more boxes than that has no numbers in them: they would be too small to read


def plan(
    schedule: str,
    pipeline_parallel: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    num_layers: int | None = None,
    config: str | None = None,
    seq_len: int | None = None,
    split: list[int] | None = None,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    transfer: float = 0.0,
    output: Path | None = None,
) -> None:
    """Print which layers each rank gets, who computes what when, how much time is idle and how many activations live.

    Args:
        schedule: gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble, zbv_zero_bubble or dualpipev.
        pipeline_parallel: ranks of the pipeline.
        num_microbatches: parts of a batch that go through the pipeline one behind the other.
        stages_per_rank: by default what the schedule needs at least.
        num_layers: of a model whose layers cost the same; by default one per stage.
        config: preset of a model instead; its dense and MoE layers and its head are weighed by their FLOPs.
        seq_len: tokens of its sequences; by default the longest.
        split: layers of each stage, such as [4,4,5,3], instead of the most even split.
        backward_input: duration of the gradients of inputs, in forward passes.
        backward_weight: duration of the gradients of weights, in forward passes.
        transfer: time until a result is at the next rank, in forward passes.
        output: picture of the timeline to write, .png or .svg.

    Raises:
        UserError: the numbers do not fit each other or the schedule.
    """
    if output is not None and output.suffix.lower() not in FORMATS:
        raise UserError(f"output {str(output)!r} must end with {' or '.join(FORMATS)}")
    if num_layers is not None and config is not None:
        raise UserError(f"give num_layers ({num_layers}) or config ({config!r}), not both")
    if seq_len is not None and (config is None or seq_len < 1):
        raise UserError(f"seq_len ({seq_len}) must be at least 1 and needs a config")
    durations = Durations(1.0, backward_input, backward_weight, transfer)
    found = find_pipeline_schedule(schedule)
    per_rank = found.stages_per_rank if stages_per_rank is None else stages_per_rank
    costs: dict[str, Any] = {}
    if config is not None:
        model = ModelConfig.preset(config)
        num_layers = model.num_layers
        costs = relative_costs(model, seq_len)
    elif num_layers is None:
        num_layers = max(sum(split or ()), pipeline_parallel * per_rank)
    stages = make_stage_map(schedule, pipeline_parallel, per_rank, num_layers, num_microbatches, split=split, **costs)
    of_stages = stage_costs(stages.layers, **costs)
    timeline = simulate(schedule, pipeline_parallel, per_rank, num_microbatches, durations, of_stages)
    if output is not None:
        draw_timeline(timeline, output)  # first, as it may fail
    print(format_plan(stages, timeline, of_stages))
    if output is not None:
        print(f"\nwritten: {output}")


def relative_costs(model: ModelConfig, seq_len: int | None = None) -> dict[str, Any]:
    """What layers and head cost by their FLOPs, in units of the model's most expensive layer.

    The embedding is a lookup and costs nothing.

    Args:
        model: whose.
        seq_len: tokens of a sequence; by default the longest that the model is meant for.

    Returns:
        ``layer_costs`` and ``last_cost`` of :func:`~olmoe_lightning.parallel.pipeline.stages.make_stage_map`.
    """
    flops = model.flops_per_layer(seq_len or model.max_seq_len)
    unit = max(flops)
    return {"layer_costs": [each / unit for each in flops], "last_cost": model.flops_of_head / unit}


def format_plan(stages: StageMap, timeline: Timeline, costs: Sequence[float]) -> str:
    """Stage map, timeline and the figures of each rank, as text.

    Args:
        stages: whose layers are where.
        timeline: of the same schedule.
        costs: of each stage, in layers.
    """
    lines = [str(stages)]
    if len(set(costs)) > 1:
        lines.append(f"cost of the stages, in layers: {', '.join(f'{cost:.3g}' for cost in costs)}")
    lines += ["", f"{timeline.num_microbatches} microbatches: {_legend(timeline)}", timeline.to_text(), ""]
    last = str(timeline.pipeline_size - 1)
    lines.append(f"{'':{5 + len(last)}}   idle  microbatches in memory")
    for rank, (idle, alive) in enumerate(zip(timeline.idle, timeline.microbatches_in_memory, strict=True)):
        lines.append(f"rank {rank:<{len(last)}} {idle:6.1%}  {alive:.4g}")
    most = max(timeline.microbatches_in_memory)
    lines.append(f"{'all':{5 + len(last)}} {timeline.bubble:6.1%}  at most {most:.4g}, each of all of a rank's layers")
    working = timeline.makespan * (1.0 - timeline.bubble)
    lines += ["", f"{timeline.makespan:.4g} forward passes of a mean stage long; {working:.4g} if no rank ever waited"]
    return "\n".join(lines)


def _legend(timeline: Timeline) -> str:
    kinds = {timed.action.kind for timed in timeline.actions}
    parts = ["0-9 forward", f"a-j {' or '.join(NAMES[kind] for kind in ('B', 'I') if kind in kinds)}"]
    if "W" in kinds:
        parts.append(f"A-J {NAMES['W']}")
    if timeline.num_microbatches > 10:
        parts.append("from microbatch 10 on again from 0")
    return ", ".join([*parts, "a dot waits"])


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Draw one line per rank, a box per action with the number of its microbatch; idle time stays grey.

    Later stages of a rank are paler than its first. The figure is drawn on its own canvas: pyplot and its global state
    stay untouched. The same timeline gives the same bytes.

    Args:
        timeline: what is drawn.
        path: file to write; its ending decides between PNG and SVG.
    """
    import matplotlib  # a slow import that only pictures need
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path as Outline

    ranks = timeline.pipeline_size
    width = min(16.0, max(6.0, 1.5 + 0.24 * timeline.makespan))
    figure = Figure(figsize=(width, 1.3 + 0.34 * ranks), dpi=110, layout="constrained")
    axes = figure.subplots()
    boxes: dict[tuple[Kind, int], list[Any]] = {}  # of one colour, which are drawn as one shape: small files
    stages_of: dict[int, list[int]] = {}
    for timed in sorted(timeline.actions, key=lambda each: each.action.stage):
        mine = stages_of.setdefault(timed.rank, [])
        if timed.action.stage not in mine:
            mine.append(timed.action.stage)
        turn = mine.index(timed.action.stage)
        if timed.end > timed.start:
            boxes.setdefault((timed.action.kind, turn), []).append(_box(timed.rank, timed.start, timed.end))
    ground = Outline.make_compound_path(*(Outline(_box(rank, 0.0, timeline.makespan)) for rank in range(ranks)))
    axes.add_patch(PathPatch(ground, facecolor=IDLE, linewidth=0))
    for (kind, turn), outlines in boxes.items():
        shape = Outline.make_compound_path(*(Outline(outline) for outline in outlines))
        color = _paler(COLORS[kind], turn / timeline.stages_per_rank * 0.7)
        axes.add_patch(PathPatch(shape, facecolor=color, edgecolor="white", linewidth=0.5))
    if len(timeline.actions) <= _MOST_LABELS:
        size = min(8.0, 72 * 0.6 * width / timeline.makespan)
        for timed in timeline.actions:
            if timed.end > timed.start and timed.action.kind != "W":  # W follows its I
                middle = (timed.start + timed.end) / 2
                text = str(timed.action.microbatch)
                axes.text(middle, timed.rank, text, ha="center", va="center", fontsize=size)
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel("time, in forward passes of a mean stage", fontsize=8)
    axes.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    kinds = {kind for kind, _ in boxes}
    legend = [Patch(facecolor=COLORS[kind], label=name) for kind, name in NAMES.items() if kind in kinds]
    legend.append(Patch(facecolor=IDLE, label="idle"))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    axes.set_title(
        f"{timeline.schedule}: {ranks} ranks, {timeline.num_microbatches} microbatches, {timeline.bubble:.1%} idle, "
        f"at most {max(timeline.microbatches_in_memory):.3g} microbatches in memory",
        fontsize=9,
    )
    form = path.suffix.lower().removeprefix(".")
    # Text stays text in SVG, in one font; neither a date nor random ids get into the file.
    options: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.sans-serif": ["DejaVu Sans"]}
    with matplotlib.rc_context(options):
        figure.savefig(path, format=form, metadata={"Date": None} if form == "svg" else None)


def _box(rank: int, start: float, end: float) -> list[tuple[float, float]]:
    """Corners of a box of the rank's line, closed."""
    top, bottom = rank - 0.4, rank + 0.4
    return [(start, top), (end, top), (end, bottom), (start, bottom), (start, top)]


def _paler(color: str, share: float) -> str:
    """A colour mixed with white."""
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
