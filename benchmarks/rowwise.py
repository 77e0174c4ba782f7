"""What travelling costs in one MoE layer: ``rowwise`` against ``all_to_all``, in two processes of one thread.

Prints a table and, last, one line of JSON.

    python benchmarks/rowwise.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _report import aligned, spread
from _run import Progress, run
from _timing import paired_ratios, summarize, turn_order
from parallel import Team

COMMS = ("rowwise", "all_to_all")
TRAVEL = ("dispatch", "combine", "combine backward", "dispatch backward")
EXPERTS = ("experts", "experts backward")

Seconds = dict[str, dict[str, list[float]]]
"""By plugin and part."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: it is wrong; the message has the numbers.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1, help="of each of the processes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-experts", action="store_true", help="leave the experts' products out: faster")
    parser.add_argument("--json-only", action="store_true", help="print the line of JSON without the table")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--tokens", type=int, default=4096, help="of each process")
    sizes.add_argument("--d-model", type=int, default=512)
    sizes.add_argument("--hidden", type=int, default=1024, help="width of an expert")
    sizes.add_argument("--experts", type=int, default=32)
    sizes.add_argument("--top-k", type=int, default=4)
    args = parser.parse_args(arguments)
    if args.processes < 2:
        parser.error(f"--processes ({args.processes}) must be at least 2: one process exchanges nothing")
    if args.experts % args.processes:
        parser.error(f"--experts ({args.experts}) must be divisible by --processes ({args.processes})")
    return args


def measure_rounds(args: argparse.Namespace, results: dict[str, Any], progress: Progress) -> None:
    """Alternating rounds of dispatch and combine, then of whole layers; a part takes as long as the slowest process."""
    results["large_pages"] = large_pages()
    with ExitStack() as stack:
        options = {name: getattr(args, name) for name in ("tokens", "d_model", "hidden", "experts", "top_k")}
        team = Team(args.processes, args.threads, stack, "rowwise", **options)

        def rounds(name: str, parts: Sequence[str], after: Callable[[], None] | None = None, **options: Any) -> Seconds:
            seconds: Seconds = {comm: {part: [] for part in parts} for comm in COMMS}
            for comm in COMMS:
                for _ in range(2):
                    progress(f"{name}, warm-up of {comm}")
                    team.ask("layer", comm=comm, **options)
            for index in range(args.rounds):
                for comm in turn_order(COMMS, index):
                    progress(f"{name}, round {index + 1} of {args.rounds}, {comm}")
                    answers = team.ask("layer", comm=comm, **options)
                    for part in parts:
                        seconds[comm][part].append(max(answer[part] for answer in answers))
                if after is not None:
                    after()
            return seconds

        keep(results, "travel", rounds("travelling", TRAVEL, experts=False))
        if args.no_experts:
            return
        products: list[float] = []
        whole = rounds("layer", (*TRAVEL, *EXPERTS), lambda: products.append(max(team.ask("products"))))
        keep(results, "layer", whole)
        experts = [sum(each) for each in zip(*(whole["rowwise"][part] for part in EXPERTS), strict=True)]
        results["products"] = summarize(products).to_dict()
        results["experts_of_products"] = paired_ratios(products, experts).to_dict()


def keep(results: dict[str, Any], name: str, seconds: Seconds) -> None:
    """Seconds of the parts, of all movements together, and the ratio of the two plugins."""
    travel = {comm: [sum(each) for each in zip(*(seconds[comm][part] for part in TRAVEL), strict=True)]
              for comm in COMMS}  # fmt: skip
    results[name] = {
        "parts": {comm: {part: summarize(values).to_dict() for part, values in by_part.items()}
                  for comm, by_part in seconds.items()},
        "total": {comm: summarize(values).to_dict() for comm, values in travel.items()},
        "ratio": paired_ratios(travel["rowwise"], travel["all_to_all"]).to_dict(),
    }  # fmt: skip


def large_pages() -> str:
    """What the system does for shared memory in large pages."""
    try:
        words = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().split()
        return next(word.strip("[]") for word in words if word.startswith("["))
    except (OSError, StopIteration):
        return "unknown"


def table(results: dict[str, Any]) -> str:
    """Everything that was measured."""
    machine, settings, load = results["machine"], results["settings"], results["load"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, torch {machine['torch']}",
        f"{settings['processes']} processes of {settings['threads']} thread, {settings['tokens']} tokens each, d_model "
        f"{settings['d_model']}, {settings['experts']} experts of width {settings['hidden']}, "
        f"top-{settings['top_k']}, fp32",
        f"load average {load['average_before']} before, {load['average_after']} after",
    ]
    if load["warning"]:
        lines.append(f"WARNING: {load['warning']}")
    lines.append(f"large pages of shared memory (shmem_enabled): {results['large_pages']}")
    for name, title in (("travel", "Dispatch and combine only"), ("layer", "The same between the experts' products")):
        if name in results:
            found = results[name]
            rows = [(f"{title}, ms", *COMMS)]
            rows += [(part, *(_ms(found["parts"][comm][part]) for comm in COMMS)) for part in found["parts"]["rowwise"]]
            rows.append(("dispatch + combine", *(_ms(found["total"][comm]) for comm in COMMS)))
            lines += ["", *aligned(rows), f"rowwise over all_to_all: {spread(found['ratio'], 3)}"]
    if "products" in results:
        lines += ["", f"bare products {_ms(results['products'])} ms; over the experts' time with rowwise: "
                      f"{spread(results['experts_of_products'], 3)}"]  # fmt: skip
    return "\n".join([*lines, "", f"median [quartiles] over the rounds; {results['seconds']:.0f} s in all", ""])


def _ms(summary: dict[str, Any]) -> str:
    return spread({name: 1000 * summary[name] for name in ("median", "q1", "q3")}, 1)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the figures."""
    args = parse_arguments(arguments)
    return run("rowwise", args, lambda results, progress: measure_rounds(args, results, progress), table)


if __name__ == "__main__":
    sys.exit(main())
