"""What travelling costs in one MoE layer: ``rowwise`` against ``all_to_all``, in two processes of one thread.

Prints a table and, last, one line of JSON.

    python benchmarks/rowwise.py
"""

from __future__ import annotations

import argparse
import socket
import sys
from contextlib import ExitStack
from typing import Any

from _report import aligned, spread
from _run import Progress, run
from _timing import paired_ratios, summarize, turn_order
from _workers import Worker

COMMS = ("rowwise", "all_to_all")
TRAVEL = ("dispatch", "combine", "combine backward", "dispatch backward")
EXPERTS = ("experts", "experts backward")


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
    if args.experts % args.processes:
        parser.error(f"--experts ({args.experts}) must be divisible by --processes ({args.processes})")
    return args


def start(args: argparse.Namespace, stack: ExitStack) -> list[Worker]:
    """The processes, with the environment of torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = {name: getattr(args, name) for name in ("tokens", "d_model", "hidden", "experts", "top_k")}
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(args.processes)}
    return [
        stack.enter_context(Worker("rowwise", args.threads, common | {"RANK": str(rank)}, **options))
        for rank in range(args.processes)
    ]


def ask(workers: list[Worker], command: str, **arguments: Any) -> list[Any]:
    """The answers in rank order."""
    for worker in workers:
        worker.send(command, **arguments)
    return [worker.receive(command) for worker in workers]


def measure_rounds(args: argparse.Namespace, results: dict[str, Any], progress: Progress) -> None:
    """Alternating rounds; a part takes as long as the slowest process."""
    parts = TRAVEL if args.no_experts else (*TRAVEL, *EXPERTS)
    seconds: dict[str, dict[str, list[float]]] = {comm: {part: [] for part in parts} for comm in COMMS}
    products = []
    with ExitStack() as stack:
        workers = start(args, stack)
        for comm in COMMS:
            for _ in range(2):
                progress(f"warm-up of {comm}")
                ask(workers, "layer", comm=comm, experts=not args.no_experts)
        for index in range(args.rounds):
            for comm in turn_order(COMMS, index):
                progress(f"round {index + 1} of {args.rounds}, {comm}")
                answers = ask(workers, "layer", comm=comm, experts=not args.no_experts)
                for part in parts:
                    seconds[comm][part].append(max(answer[part] for answer in answers))
            if not args.no_experts:
                products.append(max(ask(workers, "products")))
    travel = {comm: [sum(each) for each in zip(*(seconds[comm][part] for part in TRAVEL), strict=True)]
              for comm in COMMS}  # fmt: skip
    results["seconds_by_part"] = {
        comm: {part: summarize(values).to_dict() for part, values in by_part.items()}
        for comm, by_part in seconds.items()
    }
    results["travel"] = {comm: summarize(values).to_dict() for comm, values in travel.items()}
    results["travel_ratio"] = paired_ratios(travel["rowwise"], travel["all_to_all"]).to_dict()
    if products:
        experts = [sum(each) for each in zip(*(seconds["rowwise"][part] for part in EXPERTS), strict=True)]
        results["products"] = summarize(products).to_dict()
        results["experts_of_products"] = paired_ratios(products, experts).to_dict()


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
    by_part = results["seconds_by_part"]
    rows = [("milliseconds", *COMMS)]
    rows += [(part, *(_ms(by_part[comm][part]) for comm in COMMS)) for part in by_part["rowwise"]]
    rows.append(("dispatch + combine", *(_ms(results["travel"][comm]) for comm in COMMS)))
    lines += ["", *aligned(rows), "", f"rowwise over all_to_all: {spread(results['travel_ratio'], 3)}"]
    if "products" in results:
        lines.append(f"bare products {_ms(results['products'])} ms; over the experts' time: "
                     f"{spread(results['experts_of_products'], 3)}")  # fmt: skip
    return "\n".join([*lines, "", f"median [quartiles] over the rounds; {results['seconds']:.0f} s in all", ""])


def _ms(summary: dict[str, Any]) -> str:
    return spread({name: 1000 * summary[name] for name in ("median", "q1", "q3")}, 1)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the figures."""
    args = parse_arguments(arguments)
    return run("rowwise", args, lambda results, progress: measure_rounds(args, results, progress), table)


if __name__ == "__main__":
    sys.exit(main())
