"""Is this a communication plugin? One call compares it with one process: rows, outputs and all gradients.

In processes that are already there, for instance under torchrun or in a test::

    check_comm_plugin(MyComm, axis)

In two processes that are started for it, from a script or a shell::

    run_conformance("my_package.my_module:MyComm", processes=2)
    python -m olmoe_lightning.plugins.comm.conformance my_package.my_module:MyComm --processes 2
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.base import CommPlugin, describe
from olmoe_lightning.plugins.comm.conformance_cases import CASES, Case
from olmoe_lightning.plugins.comm.conformance_layer import Findings, Setting


@dataclass(frozen=True)
class CaseResult:
    """What all processes together found in one case."""

    case: str
    problems: tuple[str, ...]
    """Each begins with the process and what differs: ``rank 1: gradient of weights: missing``."""
    deviation: float
    """The largest from the reference, relative to the largest value of its tensor."""
    raised: bool = False
    """Whether a process raised; the cases after it were not run then."""


class ConformanceError(AssertionError):
    """A plugin is not what it has to be; the message is the table of the cases and what went wrong."""

    def __init__(self, results: Sequence[CaseResult], title: str) -> None:
        super().__init__(f"{title}\n{format_table(results)}")
        self.results, self.title = list(results), title

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.results, self.title)  # it travels between processes


def format_table(results: Sequence[CaseResult]) -> str:
    """One line per case, and a line per problem below it."""
    width = max(len(result.case) for result in results)
    lines = [f"{'case':{width}}  verdict  largest deviation"]
    for result in results:
        verdict = "FAILED" if result.problems else "ok"
        lines.append(f"{result.case:{width}}  {verdict:7}  {result.deviation:.1e}")
        lines += ["    " + problem.replace("\n", "\n    ") for problem in result.problems]
    failed = sum(bool(result.problems) for result in results)
    lines.append(f"{len(results) - failed} of {len(results)} cases passed")
    if results[-1].raised:
        lines.append("the cases after an error were not run")
    return "\n".join(lines)


def check_comm_plugin(
    make_plugin: Callable[[], CommPlugin],
    axis: Axis,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    timeout: float = 60,
) -> list[CaseResult]:
    """Compare a plugin with one process in all cases. To be called by every process of the axis.

    Args:
        make_plugin: gives a new plugin, most often its class.
        axis: the processes that share the experts.
        device: where the rows are.
        dtype: of the rows.
        timeout: seconds that processes wait for each other at the end of a case.

    Returns:
        The results, the same on all processes.

    Raises:
        ConformanceError: on all processes, when one of them found a problem.
    """
    setting = Setting(axis, torch.device(device), dtype)
    title = f"{getattr(make_plugin, '__name__', make_plugin)} on {axis.size} processes, {setting.device}, {dtype}"
    # Results travel in a group of their own: a plugin that fails leaves the axis' group in an unknown state. It is kept
    # until the process ends: else torch would give the next group of these ranks its name, and so its old addresses.
    wait = datetime.timedelta(seconds=timeout)
    control = (
        dist.new_group(list(axis.ranks), timeout=wait, backend="gloo", use_local_synchronization=True)
        if axis.size > 1
        else None
    )
    results: list[CaseResult] = []
    for case in CASES:
        findings, raised = _try(make_plugin, case, setting)
        mine = [f"rank {axis.rank}: {problem}" for problem in findings.problems]
        everyone: list[Any] = [(mine, findings.deviation, raised)]
        if control is not None:
            everyone = [None] * axis.size
            try:
                dist.all_gather_object(everyone, (mine, findings.deviation, raised), group=control)
            except RuntimeError as error:
                mine.append(f"{describe(axis)}: the others did not end this case within {timeout} s: {error}")
                everyone = [(mine, findings.deviation, True)]
        problems = tuple(problem for part in everyone for problem in part[0])
        deviation, raised = max(part[1] for part in everyone), any(part[2] for part in everyone)
        results.append(CaseResult(case.name, problems, deviation, raised))
        if raised:
            break
    if any(result.problems for result in results):
        raise ConformanceError(results, title)
    return results


def _try(make_plugin: Callable[[], CommPlugin], case: Case, setting: Setting) -> tuple[Findings, bool]:
    findings = Findings()
    try:
        plugin = make_plugin()
        if reason := plugin.unavailable(setting.axis.size, setting.device):
            raise RuntimeError(f"the plugin cannot run here: {reason}")
        plugin.setup(setting.axis, case.batch(setting).spec)
        case.check(plugin, case, setting, findings)
        plugin.teardown()
        plugin.teardown()
    except Exception:  # a third party's plugin may raise anything, and the other processes must learn of it
        findings.problems.append(f"raised\n{traceback.format_exc().rstrip()}")
        return findings, True
    return findings, False


def run_conformance(
    plugin: str | Callable[[], CommPlugin],
    processes: int = 2,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    timeout: float = 30,
) -> list[CaseResult]:
    """Start processes on this machine and let them check a plugin.

    A script that calls this must do so under ``if __name__ == "__main__":``, since the processes import it too.

    Args:
        plugin: ``"module:Class"``, or something at the top of a module that makes a plugin.
        processes: how many.
        device: ``"cpu"`` (gloo), or ``"cuda"`` (NCCL), where each process takes its own device.
        dtype: of the rows.
        timeout: seconds that an exchange between processes may take; ten times as many for all.

    Returns:
        The results.

    Raises:
        ConformanceError: a problem was found.
        RuntimeError: a process ended without a result.
    """
    make_plugin = _maker(plugin)  # what cannot be imported here need not be tried elsewhere
    if processes == 1:
        return check_comm_plugin(make_plugin, Axis("expert", (0,), 0), device, dtype)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(processes):
            here, there = context.Pipe(duplex=False)
            arguments = (there, plugin, rank, processes, f"{folder}/store", device, dtype, timeout)
            process = context.Process(target=_one_process, args=arguments, daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        answers: list[Any] = []
        for process, here in started:
            try:
                answers.append(
                    here.recv() if here.poll(10 * timeout) else RuntimeError(f"no result in {10 * timeout} s")
                )
            except EOFError:
                process.join()
                answers.append(RuntimeError(f"a process ended with exit code {process.exitcode} and without a result"))
        for process, _ in started:
            process.join(timeout)
            process.kill()
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    if errors:
        raise next((error for error in errors if isinstance(error, ConformanceError)), errors[0])
    return answers[0]


def _one_process(
    answer: Any, plugin: Any, rank: int, size: int, store: str, device: str, dtype: torch.dtype, timeout: float
) -> None:
    try:
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
        wait = datetime.timedelta(seconds=timeout)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
        axis = Axis("expert", tuple(range(size)), rank, dist.group.WORLD)
        place = torch.device(device, rank) if device == "cuda" else torch.device(device)
        # A process that raises waits until the others have given up their exchange, so that all say what they saw.
        answer.send(check_comm_plugin(_maker(plugin), axis, place, dtype, 2 * timeout))
        dist.destroy_process_group()
    except ConformanceError as error:
        answer.send(error)
    except Exception:
        answer.send(RuntimeError(f"rank {rank}: {traceback.format_exc()}"))


def _maker(plugin: str | Callable[[], CommPlugin]) -> Callable[[], CommPlugin]:
    if not isinstance(plugin, str):
        return plugin
    module, _, name = plugin.partition(":")
    if not name:
        raise UserError(f"a plugin is named 'module:Class', got {plugin!r}")
    return getattr(importlib.import_module(module), name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a plugin from the shell; the exit code is 0 when all cases pass."""
    parser = argparse.ArgumentParser(description="Check a communication plugin against one process.")
    parser.add_argument("plugin", help="module:Class")
    parser.add_argument("--processes", type=int, default=2, help="how many processes share the experts")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the rows are")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the rows")
    options = parser.parse_args(arguments)
    try:
        results = run_conformance(options.plugin, options.processes, options.device, getattr(torch, options.dtype))
    except ConformanceError as error:
        print(error)
        return 1
    print(format_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
