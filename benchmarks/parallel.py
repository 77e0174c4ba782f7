"""Two processes against each other's strategies: expert parallel, data parallel, Lightning's DDP; and one process.

Prints a table and, last, one line of JSON. What the numbers mean is in ``docs/performance.md``.

    python benchmarks/parallel.py                 # about five minutes on two cores
    python benchmarks/parallel.py --part memory   # bytes per rank against the formula
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from typing import Any

from _report import aligned, spread
from _run import Progress, run, sized_model
from _timing import paired_ratios, summarize, turn_order
from _workers import Worker

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.tools.processes import free_port, torchrun_environment

PARTS = ("speed", "single", "memory")
WARMUP_STEPS = 4
PAIR = ("moe_ep2", "moe", "ddp")
ALONE = ("moe", "auto")
NAMES = {
    "moe_ep2": "MoEStrategy, EP=2",
    "moe": "MoEStrategy, DP=2",
    "ddp": "Lightning ddp",
    "auto": "Lightning single device",
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: it is wrong; the message has the numbers.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a turn")
    parser.add_argument("--threads", type=int, default=1, help="of each of the two processes")
    parser.add_argument(
        "--router",
        choices=("random", "learned"),
        default="random",
        help="random: equally loaded ranks, so that the cost of travelling is seen; learned: what training makes of it",
    )
    parser.add_argument("--comm", choices=("auto", "all_to_all", "rowwise"), default="auto", help="of EP=2")
    parser.add_argument("--json-only", action="store_true", help="print the line of JSON without the table")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--d-model", type=int, default=256)
    sizes.add_argument("--layers", type=int, default=4)
    sizes.add_argument("--heads", type=int, default=4)
    sizes.add_argument("--experts", type=int, default=16)
    sizes.add_argument("--hidden", type=int, default=256, help="width of an expert")
    sizes.add_argument("--top-k", type=int, default=4)
    sizes.add_argument("--vocab", type=int, default=2048)
    sizes.add_argument("--seq-len", type=int, default=256)
    sizes.add_argument("--tokens", type=int, default=4096, help="tokens of a global step")
    args = parser.parse_args(arguments)
    for name in ("rounds", "steps", "threads", "tokens", "seq_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} ({getattr(args, name)}) must be at least 1")
    if args.tokens % (2 * args.seq_len):
        parser.error(f"--tokens ({args.tokens}) must be a multiple of 2 x --seq-len ({args.seq_len})")
    try:
        model_config(args)
    except ValueError as error:
        parser.error(str(error))
    if args.experts % 2:
        parser.error(f"--experts ({args.experts}) must be even, to be shared by two processes")
    return args


def model_config(args: argparse.Namespace) -> ModelConfig:
    """OLMoE's options at the sizes of the command line."""
    return sized_model(args, top_k=args.top_k, max_seq_len=args.seq_len, router_mode=args.router)


class Team:
    """The processes of one run; what they are asked, they do together.

    Args:
        processes: their number; each computes with ``threads`` threads.
        threads: of each.
        stack: closes them.
        kind: of worker, see :data:`_workers.SIDES`.
        options: of that worker's side.
    """

    def __init__(self, processes: int, threads: int, stack: ExitStack, kind: str = "parallel", **options: Any) -> None:
        port = free_port()
        self.workers = []
        for rank in range(processes):
            environment = torchrun_environment(rank, processes, port) if processes > 1 else {}
            worker = Worker(kind, threads, environment, processes=processes, **options)
            self.workers.append(stack.enter_context(worker))

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        """The answers in rank order."""
        for worker in self.workers:
            worker.send(command, **arguments)
        return [worker.receive(command) for worker in self.workers]


def run_turns(team: Team, ways: tuple[str, ...], args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Short fits under each strategy in turn, several rounds."""
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways:
        progress(f"warm-up of {NAMES[way]}")
        team.ask("measure", way=way, count=1, warmup=2)
    for index in range(args.rounds):
        for way in turn_order(list(ways), index):
            progress(f"round {index + 1} of {args.rounds}, {NAMES[way]}")
            gaps = team.ask("measure", way=way, count=args.steps, warmup=WARMUP_STEPS)[0]
            speeds[way].append(args.tokens / statistics.median(gaps))  # a step that something disturbed counts as one
    return {
        way: {
            "tokens_per_s": summarize(speed).to_dict(),
            "over": {other: paired_ratios(speed, speeds[other]).to_dict() for other in ways if other != way},
        }
        for way, speed in speeds.items()
    }


def run_memory(team: Team, progress: Progress) -> list[dict[str, Any]]:
    """Bytes per rank after two steps, of every layout and precision."""
    rows = []
    for way in ("moe", "moe_ep2"):
        for bf16 in (False, True):
            progress(f"memory of {NAMES[way]}, {'bf16' if bf16 else 'fp32'}")
            by_rank = team.ask("memory", way=way, bf16=bf16)
            rows.append({"way": way, "precision": "bf16" if bf16 else "fp32", "by_rank": by_rank})
    return rows


def table(results: dict[str, Any]) -> str:
    """Everything that was measured."""
    machine, settings, load = results["machine"], results["settings"], results["load"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, torch {machine['torch']}, "
        f"lightning {machine['lightning']}",
        f"d_model {settings['d_model']}, {settings['layers']} layers, {settings['experts']} experts of width "
        f"{settings['hidden']}, top-{settings['top_k']}, {settings['router']} routing, comm {settings['comm']}, "
        f"{settings['tokens']} tokens a step, fp32, fused AdamW",
        f"load average {load['average_before']} before, {load['average_after']} after",
    ]
    if load["warning"]:
        lines.append(f"WARNING: {load['warning']}")
    for part, title in (
        ("speed", f"Two processes of {settings['threads']} thread over gloo"),
        ("single", f"One process of {2 * settings['threads']} threads"),
    ):
        if part in results:
            rows = [("strategy", "tokens/s", "ratios")]
            for way, figures in results[part].items():
                ratios = "; ".join(f"{spread(ratio, 3)}x {NAMES[other]}" for other, ratio in figures["over"].items())
                rows.append((NAMES[way] if part == "speed" else NAMES[way].replace(", DP=2", ""), "", ""))
                rows[-1] = (rows[-1][0], spread(figures["tokens_per_s"], 0), ratios)
            lines += ["", f"{title} ({settings['rounds']} rounds of {settings['steps']} steps)", *aligned(rows)]
    if "memory" in results:
        rows = [("layout", "precision", "rank", "MB measured", "MB by the formula", "ratio")]
        for row in results["memory"]:
            for rank, figures in enumerate(row["by_rank"]):
                measured, predicted = figures["measured"] / 1e6, figures["predicted"] / 1e6
                rows.append(
                    (
                        NAMES[row["way"]],
                        row["precision"],
                        str(rank),
                        f"{measured:.2f}",
                        f"{predicted:.2f}",
                        f"{measured / predicted:.4f}",
                    )
                )
        lines += ["", "Bytes that stay between steps: weights, gradients, masters, moments", *aligned(rows)]
    return "\n".join([*lines, "", f"median [quartiles] over the rounds; {results['seconds']:.0f} s in all", ""])


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for, and print the figures."""
    args = parse_arguments(arguments)
    parts = PARTS if args.part == "all" else (args.part,)
    options = {
        "config": model_config(args).to_dict(),
        "seq_len": args.seq_len,
        "tokens": args.tokens,
        "comm": args.comm,
    }

    def measure(results: dict[str, Any], progress: Progress) -> None:
        with ExitStack() as stack:
            if "speed" in parts or "memory" in parts:
                pair = Team(2, args.threads, stack, **options)
                if "memory" in parts:
                    results["memory"] = run_memory(pair, progress)
                if "speed" in parts:
                    results["speed"] = run_turns(pair, PAIR, args, progress)
        with ExitStack() as stack:
            if "single" in parts:
                results["single"] = run_turns(Team(1, 2 * args.threads, stack, **options), ALONE, args, progress)

    return run("parallel", args, measure, table)


if __name__ == "__main__":
    sys.exit(main())
