"""Checkpoints of two processes: bandwidth against ``torch.save``, what a save in the background blocks, bytes, memory.

Prints a table and, last, one line of JSON. What the numbers mean is in ``docs/checkpoints.md``.

    python benchmarks/checkpoint.py                  # some minutes
    python benchmarks/checkpoint.py --folder /data   # on the disk that matters
    python benchmarks/checkpoint.py --part libraries # what libraries do the same with, in the places of our parts
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

from _report import aligned, spread
from _run import Progress, run, sized_model
from _timing import paired_ratios, summarize
from parallel import Team

from olmoe_lightning.config import ModelConfig

PROCESSES = 2


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: it is wrong; the message has the numbers.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("own", "libraries"), default="own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--json-only", action="store_true", help="print the line of JSON without the table")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--d-model", type=int, default=512)
    sizes.add_argument("--layers", type=int, default=8)
    sizes.add_argument("--heads", type=int, default=8)
    sizes.add_argument("--experts", type=int, default=32)
    sizes.add_argument("--hidden", type=int, default=256, help="width of an expert")
    sizes.add_argument("--vocab", type=int, default=2048)
    args = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} ({getattr(args, name)}) must be at least 1")
    if args.experts % PROCESSES:
        parser.error(f"--experts ({args.experts}) must be even, to be shared by {PROCESSES} processes")
    try:
        model_config(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def model_config(args: argparse.Namespace) -> ModelConfig:
    """OLMoE's options at the sizes of the command line."""
    return sized_model(args, top_k=2, max_seq_len=32)


def slowest(by_rank: list[dict[str, list[float]]], way: str) -> list[float]:
    """Seconds of each round, of the process that took longest."""
    return [max(seconds) for seconds in zip(*(rank[way] for rank in by_rank), strict=True)]


def measure_speed(team: Team, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Saves and loads against plain ones of the same bytes in the same round."""
    progress(f"{args.rounds} rounds of saves")
    saves = team.ask("save", rounds=args.rounds)
    by_rank = [rank["seconds"] for rank in saves]
    seconds = {way: slowest(by_rank, way) for way in by_rank[0]}
    progress(f"{args.rounds} rounds of loads")
    loads = team.ask("load", rounds=args.rounds)
    read = {way: slowest(loads, way) for way in ("plain", "resume")}
    size = sum(rank["bytes"] for rank in saves)
    return {
        "bytes": size,
        "save_mb_per_s": summarize([size / 1e6 / s for s in seconds["sync"]]).to_dict(),
        "plain_save_mb_per_s": summarize([size / 1e6 / s for s in seconds["plain"]]).to_dict(),
        "save_bandwidth_over_plain": paired_ratios(seconds["plain"], seconds["sync"]).to_dict(),
        "load_mb_per_s": summarize([size / 1e6 / s for s in read["resume"]]).to_dict(),
        "plain_load_mb_per_s": summarize([size / 1e6 / s for s in read["plain"]]).to_dict(),
        "load_bandwidth_over_plain": paired_ratios(read["plain"], read["resume"]).to_dict(),
        "sync_seconds": summarize(seconds["sync"]).to_dict(),
        "async_blocked_seconds": summarize(seconds["async"]).to_dict(),
        "async_seconds": summarize(seconds["async_all"]).to_dict(),
        "async_blocked_over_sync": paired_ratios(seconds["async"], seconds["sync"]).to_dict(),
        "overlap_blocked_seconds": summarize(seconds["overlap"]).to_dict(),
        "overlap_blocked_over_sync": paired_ratios(seconds["overlap"], seconds["sync"]).to_dict(),
        "on_disk": {"fp32": _disk(saves[0])},
    }


LIBRARY_WRITERS = ("sync", "torch_1_thread", "torch_2_threads", "torch_file_per_range")
LIBRARY_READERS = ("resume", "torch_resume")


def measure_libraries(args: argparse.Namespace, options: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Saves, loads, conversions and building, with our parts and with those of libraries in their places."""
    results: dict[str, Any] = {}
    ways = ("plain", *LIBRARY_WRITERS)
    with ExitStack() as stack:
        progress("memory of saves and loads")
        team = Team(PROCESSES, args.threads, stack, "checkpoint", **options)
        memory = team.ask("memory", saves=LIBRARY_WRITERS, loads=LIBRARY_READERS)
    with ExitStack() as stack:
        team = Team(PROCESSES, args.threads, stack, "checkpoint", **options)
        progress(f"{args.rounds} rounds of saves")
        by_rank = [rank["seconds"] for rank in team.ask("save", rounds=args.rounds, ways=ways)]
        saves = {way: slowest(by_rank, way) for way in ways}
        progress(f"{args.rounds} rounds of loads")
        loads = team.ask("load", rounds=args.rounds, saved_in_ways=len(ways), ways=LIBRARY_READERS)
        read = {way: slowest(loads, way) for way in ("plain", *LIBRARY_READERS)}
        for seconds in (saves, read):
            for way in [way for way in seconds if way != "plain"]:
                results[way] = {
                    "seconds": summarize(seconds[way]).to_dict(),
                    "bandwidth_over_plain": paired_ratios(seconds["plain"], seconds[way]).to_dict(),
                    "memory_over_limit": max(found[way] / (found["shard"] + found["bucket"]) for found in memory),
                }
        progress(f"{args.rounds} rounds of building")
        built = team.ask("build", rounds=args.rounds)
    for way in built[0]:
        with ExitStack() as stack:
            progress(f"memory of building, {way}")
            reserved = Team(PROCESSES, args.threads, stack, "checkpoint", **options).ask("build_memory", way=way)
        results[f"build, {way}"] = {
            "seconds": summarize(slowest(built, way)).to_dict(),
            "memory_over_own": max(rank["peak"] / rank["own"] for rank in reserved),
        }
    with ExitStack() as stack:
        progress(f"{args.rounds} rounds of conversions")
        (found,) = Team(1, args.threads, stack, "conversion", **options).ask("measure", rounds=args.rounds)
        for way, times in found["seconds"].items():
            results[f"convert, {way}"] = {
                "seconds": summarize(times).to_dict(),
                "over_ours": paired_ratios(times, found["seconds"]["ours"]).to_dict(),
                "memory_over_weights": found["memory"][way] / found["bytes"],
            }
    return results


def _disk(saved: dict[str, Any]) -> dict[str, float]:
    expected = 12 * saved["parameters"]
    return {
        "bytes": saved["on_disk"],
        "parameters": saved["parameters"],
        "over_12_per_parameter": saved["on_disk"] / expected,
        "tensors_over_12_per_parameter": saved["tensors_on_disk"] / expected,
    }


def table(results: dict[str, Any]) -> str:
    """Everything that was measured."""
    machine, load = results["machine"], results["load"]
    heading = [
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, torch {machine['torch']}, "
        f"lightning {machine['lightning']}",
        f"{results['parameters'] / 1e6:.1f} million parameters, {PROCESSES} processes, EP={PROCESSES}, "
        f"{results['settings']['rounds']} rounds",
        f"load average {load['average_before']} before, {load['average_after']} after",
    ]
    if load["warning"]:
        heading.append(f"WARNING: {load['warning']}")
    lines = _library_lines(results["libraries"]) if "libraries" in results else _own_lines(results)
    end = f"median [quartiles] over the rounds; {results['seconds']:.0f} s in all"
    return "\n".join([*heading, *lines, "", end, ""])


def _library_lines(libraries: dict[str, Any]) -> list[str]:
    rows = [("", "s", "relative", "memory")]
    for way, found in libraries.items():
        relative = found.get("bandwidth_over_plain") or found.get("over_ours")
        memory = next(value for name, value in found.items() if name.startswith("memory"))
        rows.append((way, spread(found["seconds"], 2), spread(relative, 2) if relative else "", f"{memory:.2f}"))
    return [
        "",
        "Relative: bandwidth over plain torch.save and torch.load (goal >= 0.7); time of a conversion over ours",
        "Memory: over own shard and one bucket (goal <= 1); of a conversion over the weights; of building, what is",
        "reserved over the own parameters",
        *aligned(rows),
    ]


def _own_lines(results: dict[str, Any]) -> list[str]:
    """Saves and loads as they are."""
    speed, lines = results["speed"], []
    rows = [("", "MB/s", "MB/s of torch.save, torch.load", "ratio", "goal")]
    for way in ("save", "load"):
        rows.append(
            (
                way,
                spread(speed[f"{way}_mb_per_s"], 0),
                spread(speed[f"plain_{way}_mb_per_s"], 0),
                spread(speed[f"{way}_bandwidth_over_plain"], 2),
                ">= 0.7",
            )
        )
    lines += ["", "Bandwidth; plain saves are followed by fsync; loads are from the page cache", *aligned(rows)]
    rows = [("save", "ms that training waits", "relative", "goal", "ms until it is published")]
    rows.append(("sync", _ms(speed["sync_seconds"]), "1", "", _ms(speed["sync_seconds"])))
    for way, until in (("async", _ms(speed["async_seconds"])), ("overlap", "")):
        blocked = spread(speed[f"{way}_blocked_over_sync"], 3)
        rows.append((way, _ms(speed[f"{way}_blocked_seconds"]), blocked, "<= 0.10", until))
    lines += ["", "Time", *aligned(rows)]
    rows = [("precision", "bytes", "over 12 per parameter", "tensors alone", "goal")]
    for precision, disk in speed["on_disk"].items():
        rows.append(
            (
                precision,
                f"{disk['bytes']:,}",
                f"{disk['over_12_per_parameter']:.4f}",
                f"{disk['tensors_over_12_per_parameter']:.4f}",
                "within 1 %",
            )
        )
    lines += ["", "On disk", *aligned(rows)]
    rows = [("rank", "", "MB more than before", "own shard MB", "one bucket MB", "over their sum", "goal")]
    for rank, found in enumerate(results["memory"]):
        for way in ("sync", "async", "resume"):
            limit = found["shard"] + found["bucket"]
            rows.append(
                (
                    str(rank),
                    way,
                    f"{found[way] / 1e6:.0f}",
                    f"{found['shard'] / 1e6:.0f}",
                    f"{found['bucket'] / 1e6:.0f}",
                    f"{found[way] / limit:.2f}",
                    "<= 1",
                )
            )
    lines += ["", "Peak of the memory that a process has of its own", *aligned(rows)]
    return lines


def _ms(seconds: dict[str, Any]) -> str:
    return spread({name: 1000 * seconds[name] for name in ("median", "q1", "q3")}, 0)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the figures."""
    args = parse_arguments(arguments)

    def measure(results: dict[str, Any], progress: Progress) -> None:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="checkpoint-benchmark-") as folder:
            options = {"config": model_config(args).to_dict(), "folder": folder}
            results["parameters"] = model_config(args).num_params
            if args.part == "libraries":
                results["libraries"] = measure_libraries(args, options, progress)
                return
            with ExitStack() as stack:
                progress("memory of saves and loads")
                results["memory"] = Team(PROCESSES, args.threads, stack, "checkpoint", **options).ask("memory")
            with ExitStack() as stack:
                team = Team(PROCESSES, args.threads, stack, "checkpoint", **options)
                results["speed"] = measure_speed(team, args, progress)
                progress("bytes of a bf16 run")
                results["speed"]["on_disk"]["bf16"] = _disk(team.ask("save", rounds=1, bf16=True)[0])

    return run("checkpoint", args, measure, table)


if __name__ == "__main__":
    sys.exit(main())
