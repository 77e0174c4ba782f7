"""Starts many short runs on two processes and looks at how they end: nothing but status 0, and no word about it.

    python tests/training/exits.py --runs 100 --forked             # what `make exits` does first
    python tests/training/exits.py --runs 5                        # and then
    python tests/training/exits.py --runs 20 --forked --hold 5 --control   # the fault that this is about

Each run is a script whose last line is ``fit``; one for each schedule of a pipeline, and one without, under Lightning's
launcher and under torchrun. ``--forked``: the processes of a run are forks of this one, which has imported everything;
they find the variables that the launcher sets, and shut the interpreter down as any other.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Timer

import torch.distributed.pipelining  # noqa: F401  for those that are forked
from tqdm import tqdm

import olmoe_lightning.strategy  # noqa: F401
from olmoe_lightning.parallel.pipeline.stages import PIPELINE_SCHEDULES
from olmoe_lightning.tools.processes import free_port, without_launcher

SCRIPT = Path(__file__).with_name("ending.py")
SCHEDULES = (*PIPELINE_SCHEDULES, "none")
LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
BEFORE = dict(os.environ)
SECONDS = 300
"""Until a run is given up; the machine may be busy."""


@dataclass
class Ends:
    """How the runs of one kind ended."""

    schedule: str
    launcher: str
    seconds: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    """Status and output of those that did not end well."""
    terminated: int = 0
    """Those that spoke of ``terminate``."""

    def add(self, arguments: list[str], forked: bool = False) -> None:
        """Start one run and wait for its end."""
        begin = time.monotonic()
        status, output = (run_forked if forked else run)(self.launcher, [self.schedule, *arguments])
        self.seconds.append(time.monotonic() - begin)
        terminated = "terminate called" in output
        self.terminated += terminated
        if status or terminated:
            self.bad.append(f"{self.schedule} under {self.launcher} ended with status {status}:\n{output}")

    def __str__(self) -> str:
        return (
            f"{self.schedule:24} {self.launcher:10} {len(self.seconds):5} {len(self.bad):8} {self.terminated:11} "
            f"{median(self.seconds):9.1f} {max(self.seconds):8.1f}"
        )


HEADER = f"{'schedule':24} {'launcher':10} {'runs':>5} {'not well':>8} {'terminate':>11} {'median s':>9} {'max s':>8}"


def run(launcher: str, arguments: list[str]) -> tuple[int, str]:
    """Exit status and output of one run; -9 for one that had no end."""
    port = str(free_port())
    command = [*LAUNCHERS[launcher], *(["--master-port", port] if launcher == "torchrun" else []), str(SCRIPT)]
    environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", "MASTER_PORT": port}
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return process.returncode, output


class InFork(BaseException):
    """Unwinds a process that was forked, which then runs the script in place of all this."""


def run_forked(launcher: str, arguments: list[str]) -> tuple[int, str]:
    """As :func:`run`, of two forks of this process."""
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    if launcher == "torchrun":
        shared |= {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    ends = []
    for rank in ("0", "1"):
        read, write = os.pipe()
        process = os.fork()
        if not process:
            os.dup2(write, 1)
            os.dup2(write, 2)
            own = {"LOCAL_RANK": rank} | ({"RANK": rank} if launcher == "torchrun" else {"NODE_RANK": "0"})
            os.environ.clear()
            os.environ.update(without_launcher(BEFORE) | shared | own)
            sys.argv = [str(SCRIPT), *arguments]
            raise InFork
        os.close(write)
        ends.append((process, read))
    texts, statuses = [], []
    for process, read in ends:
        watch = Timer(SECONDS, os.kill, (process, signal.SIGKILL))
        watch.start()
        with os.fdopen(read, errors="replace") as output:
            texts.append(output.read())
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        watch.cancel()
        watch.join()
    return next(filter(None, statuses), 0), "".join(texts)


def ends_of(
    runs: int,
    schedules: list[str],
    launchers: list[str],
    arguments: list[str],
    quiet: bool = False,
    forked: bool = False,
) -> list[Ends]:
    """Of each schedule under each launcher; in turns, so that each meets the same machine."""
    found = [Ends(schedule, launcher) for schedule in schedules for launcher in launchers]
    with tqdm(total=runs * len(found), unit="run", disable=quiet) as bar:
        for _ in range(runs):
            for each in found:
                each.add(arguments, forked)
                bar.set_postfix_str(f"{sum(len(e.bad) for e in found)} not well")
                bar.update()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run them, and show a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100, help="of each schedule under each launcher")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS), choices=list(LAUNCHERS))
    parser.add_argument("--hold", type=float, default=0.005, help="seconds that the main thread keeps Python's lock")
    parser.add_argument("--forked", action="store_true", help="fork the processes of a run, which is quicker")
    parser.add_argument("--control", action="store_true", help="without what the strategy does about it")
    args = parser.parse_args(arguments)
    if args.runs < 1:
        parser.error(f"--runs ({args.runs}) must be at least 1")
    extra = [str(args.hold), *(["control"] if args.control else [])]
    found = ends_of(args.runs, args.schedules, args.launchers, extra, forked=args.forked)
    print(HEADER)
    print(*found, sep="\n")
    for text in [text for each in found for text in each.bad][:3]:
        print(f"\n{text}")
    return int(any(each.bad for each in found))


if __name__ == "__main__":
    tqdm.monitor_interval = 0  # a thread, which forks would not have
    try:
        end = main()
    except InFork:
        runpy.run_path(str(SCRIPT), run_name="__main__")
        end = 0
    sys.exit(end)
