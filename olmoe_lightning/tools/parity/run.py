"""Start the processes of a comparison on this machine, wait for them, compare."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from olmoe_lightning.errors import UserError
from olmoe_lightning.plugins.comm.registry import make_comm
from olmoe_lightning.tools.parity.case import ParityCase
from olmoe_lightning.tools.parity.compare import Row, compare
from olmoe_lightning.tools.parity.record import RunRecord, record
from olmoe_lightning.tools.parity.sabotage import Sabotage, check_sabotage

AFTERMATH_SECONDS = 5.0
"""How long the other processes have to say what they noticed, after one has failed."""
_SHOWN_LINES = 60
# What launchers leave in the environment would make the reference believe that it is one of several processes.
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")

# The clock runs before anything is imported. It ends a process that hangs, with its stack, or whose parent has gone.
_PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(float(sys.argv[1]), exit=True)
from olmoe_lightning.tools.parity.run import work
work(sys.argv[2])
"""


class ParityError(RuntimeError):
    """A process failed or did not end in time; the message holds what it said."""


@dataclasses.dataclass
class _Process:
    name: str
    popen: subprocess.Popen[bytes]
    output: Path

    def said(self) -> str:
        text = self.output.with_suffix(".log").read_text(errors="replace").rstrip()
        return "\n".join(text.splitlines()[-_SHOWN_LINES:])


def run_parity(
    case: ParityCase,
    sabotage: Sabotage | None = None,
    timeout: float = 120.0,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Train a case in one process and in those of the topology, all on this machine, and compare.

    Args:
        case: what to compare.
        sabotage: make this mistake in the topology; some rows must deviate then.
        timeout: seconds, after which the processes are ended.
        progress: is told what goes on, in lines.

    Returns:
        The table.

    Raises:
        ValueError: the comm plugin cannot be used, the sabotage would be without effect, or there is no time.
        ParityError: a process failed or hung.
    """
    if timeout <= 0:
        raise UserError(f"timeout ({timeout}) must be positive, in seconds")
    device = torch.device("cuda" if case.accelerator == "gpu" else "cpu")
    make_comm(case.comm, case.expert_parallel, device)
    if sabotage is not None:
        check_sabotage(case, sabotage)
    begin = time.monotonic()
    mesh = case.mesh
    stages = f"pipeline {mesh.pipeline} ({case.schedule}) x " if mesh.pipeline > 1 else ""
    progress(
        f"{case.steps} steps; reference: 1 process, {case.accumulate * case.parts} microbatches a step; topology: "
        f"{case.devices} processes, {stages}expert_replica {mesh.expert_replica} x expert {mesh.expert}, "
        f"{case.accumulate * case.num_microbatches} each"
    )
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        processes = _start(case, sabotage, timeout, Path(folder))
        try:
            _wait(processes, timeout, lambda line: progress(f"{time.monotonic() - begin:5.1f} s  {line}"))
        finally:
            for process in processes:
                process.popen.kill()
            for process in processes:
                process.popen.wait()
        reference, other = (_load(processes[index].output) for index in (0, 1))
    return compare(reference, other, case.bound)


def _start(case: ParityCase, sabotage: Sabotage | None, timeout: float, folder: Path) -> list[_Process]:
    """The reference, then the ranks in order."""
    common = {
        name: value for name, value in os.environ.items() if name not in _TORCHRUN and not name.startswith(_LAUNCHERS)
    }
    common["OMP_NUM_THREADS"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(-1, case.devices):
        alone = rank < 0
        name = "the reference" if alone else f"rank {rank} of {case.devices}"
        output = folder / ("reference" if alone else f"rank{rank}")
        numbers = (rank, rank, case.devices, case.devices, 0, "127.0.0.1", port)
        torchrun = {} if alone else {key: str(value) for key, value in zip(_TORCHRUN, numbers, strict=True)}
        job = {
            "case": dataclasses.asdict(case),
            "alone": alone,
            "sabotage": None if alone else sabotage,
            "output": str(output),
        }
        with output.with_suffix(".log").open("wb") as log:
            popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(timeout), json.dumps(job)],
                env={**common, **torchrun},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        processes.append(_Process(name, popen, output))
    return processes


def _wait(processes: list[_Process], timeout: float, progress: Callable[[str], None]) -> None:
    running = list(processes)
    # The processes end themselves in time, with their stacks; this is for one that cannot.
    deadline = time.monotonic() + timeout + AFTERMATH_SECONDS
    failed: list[_Process] = []
    while running and time.monotonic() < deadline:
        for process in [process for process in running if process.popen.poll() is not None]:
            running.remove(process)
            if process.popen.returncode:
                failed.append(process)
                deadline = min(deadline, time.monotonic() + AFTERMATH_SECONDS)
            else:
                progress(f"{process.name} is done")
        time.sleep(0.02)
    if failed:
        first, *others = failed
        texts = [f"{first.name} failed (exit status {first.popen.returncode}):\n{first.said()}"]
        for other in others:
            last = other.said().splitlines()[-1:]
            texts.append(f"{other.name} failed after it (exit status {other.popen.returncode}): {''.join(last)}")
        raise ParityError("\n\n".join(texts))
    if running:
        names = ", ".join(process.name for process in running)
        raise ParityError(f"no end of {names} within {timeout:.0f} s, although they were to end by themselves")


def _load(path: Path) -> RunRecord:
    return torch.load(path, weights_only=False)  # written by our own process, a moment ago


def work(job: str) -> None:
    """What a process does: train, and save what was recorded.

    Args:
        job: JSON of ``case``, ``alone``, ``sabotage`` and ``output``, a path.
    """
    arguments = json.loads(job)
    torch.set_num_threads(1)
    run = record(ParityCase(**arguments["case"]), arguments["alone"], arguments["sabotage"])
    if run is not None:
        torch.save(run, arguments["output"])
