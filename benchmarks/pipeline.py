"""Pipeline schedules: how much time is idle and how many activations are kept, from each schedule's table of actions.

Prints a table for each part and, last, one line of JSON. What the numbers mean is in ``docs/pipeline.md``.

    python benchmarks/pipeline.py                # every part
    python benchmarks/pipeline.py --part plan    # computed, in a few seconds
    python benchmarks/pipeline.py --part measured   # two processes of one thread, about two minutes
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from _report import aligned, spread
from _timing import summarize, turn_order
from parallel import Team

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.parallel.pipeline.stages import PIPELINE_SCHEDULES
from olmoe_lightning.tools.timeline import Durations, simulate

RANKS = (2, 4, 8)
MICROBATCHES = (8, 16, 32)
MEASURED = ("1f1b", "zbv_zero_bubble")
SEQ_LEN = 256
Part = tuple[dict[str, Any], list[str]]
"""Results for JSON, and the same as lines of text."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: it is wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--backward-input", type=float, default=1.0, help="gradients of inputs, in forward passes")
    parser.add_argument("--backward-weight", type=float, default=1.0, help="gradients of weights, in forward passes")
    parser.add_argument("--microbatches", type=int, default=8, help="of the measured part")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a measured microbatch")
    parser.add_argument("--rounds", type=int, default=4, help="of the measured part")
    parser.add_argument("--steps", type=int, default=3, help="of a measured turn")
    parser.add_argument("--json-only", action="store_true", help="print the line of JSON without the tables")
    args = parser.parse_args(arguments)
    try:
        Durations(1.0, args.backward_input, args.backward_weight)
    except ValueError as error:
        parser.error(str(error))
    return args


def plan_part(args: argparse.Namespace) -> Part:
    """Every schedule with its default number of stages per rank, all of equal size, over ranks and microbatches."""
    durations = Durations(1.0, args.backward_input, args.backward_weight)
    entries: list[dict[str, Any]] = []
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            for schedule in PIPELINE_SCHEDULES.values():
                entry = {
                    "schedule": schedule.name,
                    "pipeline_parallel": ranks,
                    "stages_per_rank": schedule.stages_per_rank,
                    "num_microbatches": microbatches,
                }
                if schedule.accepts(ranks, schedule.stages_per_rank, microbatches):
                    timeline = simulate(schedule.name, ranks, schedule.stages_per_rank, microbatches, durations)
                    entry |= {
                        "idle": round(timeline.bubble, 6),
                        "activation_copies": list(timeline.activation_peaks),
                        "microbatches_in_memory": list(timeline.microbatches_in_memory),
                    }
                entries.append(entry)

    lines = [
        f"Idle share of all ranks' time, and the most microbatches in memory on the fullest rank; backward "
        f"{args.backward_input:g} + {args.backward_weight:g} forward passes, equal stages, transfers free"
    ]
    for ranks in RANKS:
        rows = [(f"{ranks} ranks", *(f"{microbatches} microbatches" for microbatches in MICROBATCHES))]
        for name in PIPELINE_SCHEDULES:
            mine = [e for e in entries if e["schedule"] == name and e["pipeline_parallel"] == ranks]
            rows.append((name, *(_cell(entry) for entry in mine)))
        lines += ["", *aligned(rows)]
    return {"backward": [args.backward_input, args.backward_weight], "by_schedule": entries}, lines


def _cell(entry: dict[str, Any]) -> str:
    if "idle" not in entry:
        return f"needs {entry['pipeline_parallel'] * entry['stages_per_rank']}"
    return f"{entry['idle']:6.1%} {max(entry['microbatches_in_memory']):5.1f}"


def measured_part(args: argparse.Namespace) -> Part:
    """Two processes of one thread: the time of a schedule against its computations divided by (1 - bubble)."""
    config = ModelConfig(
        vocab_size=512,
        d_model=256,
        num_layers=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        num_experts=16,
        top_k=4,
        expert_hidden=256,
        max_seq_len=SEQ_LEN,
        router_mode="random",  # equal work for each microbatch
    )
    found: dict[str, dict[str, list[float]]] = {name: {"ratio": [], "step": [], "waste": []} for name in MEASURED}
    tokens = 2 * SEQ_LEN * args.rows * args.microbatches  # of which a process without a pipeline would have half
    with ExitStack() as stack:
        options = {"config": config.to_dict(), "seq_len": SEQ_LEN, "tokens": tokens}
        team = Team(2, 1, stack, **options)
        for index in range(args.rounds + 1):  # the first round warms up
            for name in turn_order(list(MEASURED), index):
                asked = {"schedule": name, "microbatches": args.microbatches, "steps": args.steps, "warmup": 1}
                ranks = team.ask("pipeline", **asked)
                if index == 0:
                    continue
                bubble = simulate(name, 2, PIPELINE_SCHEDULES[name].stages_per_rank, args.microbatches).bubble
                for step in range(args.steps):
                    took = max(rank["step"][step] for rank in ranks)
                    compute = sum(rank["compute"][step] for rank in ranks) / len(ranks)
                    found[name]["step"].append(took)
                    found[name]["ratio"].append(took / (compute / (1 - bubble)))
                    found[name]["waste"].append(1 - compute / took)
    rows = [("schedule", "s a step", "idle by the plan", "not computing", "time over compute / (1 - bubble)")]
    results: dict[str, Any] = {"microbatches": args.microbatches, "rows": args.rows, "rounds": args.rounds}
    for name, values in found.items():
        summaries = {key: summarize(each).to_dict() for key, each in values.items()}
        bubble = simulate(name, 2, PIPELINE_SCHEDULES[name].stages_per_rank, args.microbatches).bubble
        results[name] = summaries | {"bubble": bubble}
        cells = (spread(summaries["step"], 3), f"{bubble:.1%}", spread(summaries["waste"], 3))
        rows.append((name, *cells, spread(summaries["ratio"], 3)))
    title = (
        f"Two processes of one thread over gloo, 8 layers, {args.microbatches} microbatches of {args.rows} x {SEQ_LEN} "
        f"tokens ({args.rounds} rounds of {args.steps} steps; median [quartiles])"
    )
    return results, [title, *aligned(rows)]


PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {"plan": plan_part, "measured": measured_part}


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    start = time.perf_counter()
    results: dict[str, Any] = {"benchmark": "pipeline"}
    for name, part in PARTS.items():
        if args.part in ("all", name):
            results[name], lines = part(args)
            if not args.json_only:
                print("\n".join(lines), end="\n\n", flush=True)
    results["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
