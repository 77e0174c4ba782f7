"""All GPU kernels on one GPU: against PyTorch, then timed beside the libraries and what the device could do at best.

    python benchmarks/gpu.py --output gpu.json               # at most six minutes
    python benchmarks/gpu.py --device cpu --smoke            # no GPU: tiny shapes, to try the script itself
    TRITON_INTERPRET=1 python benchmarks/gpu.py --device cpu --smoke      # so that Triton's kernels run too

Prints a table and, last, one line of JSON; ``--output`` is written after every part, so that nothing is lost. The exit
status is 1 when a kernel is wrong or breaks, whatever its speed, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from _gpu_cases import OLMOE, TINY, Case, Cases, Row
from _gpu_checks import LARGE, Check, Checks, difference
from _gpu_checks import TINY as TINY_CHECKS
from _gpu_clock import Clock
from _gpu_layer import Layers
from _machine import describe
from _report import aligned, spread

from olmoe_lightning.kernels.choice import interpreted_kernels, triton_missing


@dataclass
class Report:
    """What was found, and what was not."""

    machine: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    profile: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """How many checks and cases."""
        return sum(not check["passed"] for check in self.checks) + len(self.errors)

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"benchmark": "gpu", "failed": self.failed, **asdict(self)})


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes; the times mean nothing")
    parser.add_argument(
        "--budget", type=float, default=330, help="seconds after which no part begins; the largest last"
    )
    parser.add_argument("--seconds", type=float, default=0.15, help="for each way of each case")
    parser.add_argument("--only", default="", help="part of a name: leave out the checks and cases without it")
    parser.add_argument("--checks-only", action="store_true", help="time nothing")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    args = parser.parse_args(arguments)
    if args.device == "cpu" and not args.smoke:
        parser.error("--device cpu is for trying the script and needs --smoke")
    return args


def run_check(check: Check, report: Report) -> None:
    """Add the outcome of one comparison; an exception is one too."""
    outcome: dict[str, Any] = {"name": check.name, "difference": None, "allowed": None, "passed": False, "error": ""}
    try:
        found, wanted, allowed = check.compute()
        apart = max(difference(a, b) for a, b in zip(found, wanted, strict=True))
        # Infinity is no JSON.
        outcome |= {"difference": min(apart, 1e30), "allowed": allowed, "passed": apart <= allowed}
    except Exception as error:  # the other kernels are checked all the same
        outcome["error"] = f"{type(error).__name__}: {error}"[:500]
    report.checks.append(outcome)


def run_case(case: Case, report: Report) -> None:
    """Add what one case took, or why it broke."""
    try:
        report.rows += case.run()
    except Exception as error:  # what was measured before is worth something
        report.errors.append(f"{case.name}: {type(error).__name__}: {str(error)[:500]}")


def profile(layers: Layers, report: Report) -> None:
    """Which kernels a layer's step consists of: says which implementations really ran."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step = layers.one_step()
    step()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
        torch.cuda.synchronize()
    # The operations that launched kernels have the same time once more.
    kernels = [event for event in recorded.key_averages() if str(event.device_type).endswith("CUDA")]
    found = sorted(((each.self_device_time_total, each.count, each.key) for each in kernels), reverse=True)
    found.insert(0, (sum(time for time, _, _ in found), sum(count for _, count, _ in found), "all"))
    report.profile = [{"microseconds": time, "count": count, "kernel": name[:90]} for time, count, name in found[:20]]


def measure(args: argparse.Namespace, report: Report, started: float) -> None:
    """Check everything, however long it takes, then time it, the largest cases last."""
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    interpreted = device.type == "cpu" and report.machine["kernels"] == "Triton, interpreted"
    triton = (device.type == "cuda" and triton_missing() is None) or interpreted
    clock = Clock(device, args.seconds, *((1, 1) if args.smoke else ()))
    cases = Cases(clock, TINY if args.smoke else OLMOE, triton)
    cases.left_out = report.left_out
    layers = Layers(cases)

    def late() -> bool:
        return time.perf_counter() - started > args.budget

    def done(name: str) -> None:
        report.seconds = time.perf_counter() - started
        print(f"[{report.seconds:5.0f} s] {name}", file=sys.stderr, flush=True)
        if args.output:
            args.output.write_text(report.to_json() + "\n")

    context: AbstractContextManager[None] = interpreted_kernels() if interpreted else contextlib.nullcontext()
    with context:
        sizes = TINY_CHECKS if args.smoke else LARGE
        checks = [*Checks(device, sizes, triton).all(), *layers.checks()]
        timed = [] if args.checks_only else sorted([*cases.all(), *layers.all()], key=lambda case: case.estimate)
        parts: list[Check | Case] = [*checks, *timed]
        for part in parts:
            if args.only not in part.name:
                continue
            if isinstance(part, Check):
                run_check(part, report)
            elif late():
                report.left_out.append(f"{part.name}: {args.budget:g} s were over")
                continue
            else:
                run_case(part, report)
            done(part.name)
        if device.type == "cuda" and not args.checks_only and not args.only and not late():
            try:
                profile(layers, report)
            except Exception as error:  # not what this is about
                report.left_out.append(f"profile: {error}")
            done("profile")


def table(report: Report) -> str:
    """Everything, for people."""
    machine = report.machine
    lines = [
        f"{machine['device']}; kernels: {machine['kernels']}; torch {machine['torch']}, triton {machine['triton']}"
    ]
    rows: list[tuple[str, ...]] = [("check", "difference", "allowed", "")]
    for check in report.checks:
        numbers = ("", "") if check["error"] else (f"{check['difference']:.1e}", f"{check['allowed']:.1e}")
        rows.append((check["name"], *numbers, "ok" if check["passed"] else f"FAILED {check['error'][:120]}"))
    lines += ["", *aligned(rows)]
    lines += ["", *aligned(_timed(report.rows))] if report.rows else []
    if report.profile:
        longest = [(f"{each['microseconds']:.0f}", str(each["count"]), each["kernel"]) for each in report.profile]
        lines += ["", *aligned([("µs", "times", "kernel of a layer's step"), *longest])]
    lines += [f"error: {error}" for error in report.errors]
    lines += [f"left out: {why}" for why in report.left_out]
    goals = [row for row in report.rows if row.goal is not None and row.relative is not None]
    reached = sum(row.relative >= row.goal for row in goals)  # type: ignore[operator]
    lines += ["", f"{report.failed} failed of {len(report.checks)} checks; {reached} of {len(goals)} goals reached; "
              f"median [quartiles]; {report.seconds:.0f} s in all", ""]  # fmt: skip
    return "\n".join(lines)


def _timed(rows: list[Row]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("", "ms", "rate", "relative to", "goal")]
    case = ""
    for row in rows:
        if row.case != case:
            case = row.case
            lines.append((case, *[""] * 4))
        ms = spread({name: 1000 * seconds for name, seconds in row.seconds.items()}, 3)
        relative = goal = ""
        if row.relative is not None:
            relative = f"{row.relative:.2f} {row.over}"
            if row.goal is not None:
                goal = f"{row.goal} {'reached' if row.relative >= row.goal else 'missed'}"
        lines.append((f"  {row.way}", ms, f"{row.rate:,.1f} {row.unit}", relative, goal))
    return lines


def machine(device: str) -> dict[str, Any]:
    """What it ran on."""
    about: dict[str, Any] = describe()
    try:
        about["triton"] = version("triton")
    except PackageNotFoundError:
        about["triton"] = "not installed"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about |= {
            "device": f"{properties.name}, SM {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB",
            "cuda": torch.version.cuda,
            "kernels": f"PyTorch ({reason})" if (reason := triton_missing()) else "Triton",
        }
        return about
    about["device"] = about["cpu"]
    about["kernels"] = "C++ and PyTorch"
    with contextlib.suppress(RuntimeError, ImportError), interpreted_kernels():
        about["kernels"] = "Triton, interpreted"
    return about


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print.

    Returns:
        The exit status.
    """
    args = parse_arguments(arguments)
    started = time.perf_counter()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: there is no GPU that torch can use; --device cpu --smoke tries this script on the CPU",
            file=sys.stderr,
        )
        return 2
    report = Report(machine(args.device))
    measure(args, report, started)
    report.seconds = time.perf_counter() - started
    print(table(report))
    print(report.to_json())
    if args.output:
        args.output.write_text(report.to_json() + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
