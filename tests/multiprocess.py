"""Worker processes for tests: started once, given functions to run together, and never able to hang a test.

    def double(rank_times: int) -> int:  # at the top of a test module
        return rank_times * torch.distributed.get_rank()

    def test_something(workers):
        assert workers(2).run(double, 2) == [0, 2]

The processes of one size share a gloo process group and the environment that torchrun would give them. They are forked
from a server that has imported torch and Lightning once, so that new ones are there in a moment after a failure.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = datetime.timedelta(seconds=60)
START_SECONDS = 120
PRELOAD = ["torch", "lightning.pytorch", "pytest"]
AFTERMATH_SECONDS = 5.0
"""How long the other ranks have to notice that one has failed, before they are killed."""


class WorkerError(Exception):
    """A function failed, died or hung in at least one worker; the message holds what each rank said."""


class Workers:
    """``size`` processes in one process group; started at the first run, and again after a failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty while nothing is running."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` in every process at once, in the current folder.

        Environment variables are those that were set when the first worker of the session was started.

        Args:
            function: defined at the top of a module; asks ``torch.distributed`` for its rank.
            *args: pickled, the same for every rank.
            timeout: seconds until the stacks of the processes that have not answered are shown and the test fails.
            **kwargs: as ``args``.

        Returns:
            What each rank returned, in rank order.

        Raises:
            WorkerError: a rank raised (its traceback is in the message), ended, or did not answer in time.
        """
        __tracebackhide__ = True
        job = pickle.dumps((function, args, kwargs))
        if not self._processes:
            self._start()
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # one that has ended is found below
                connection.send_bytes(pickle.dumps((os.getcwd(), sys.path, job)))
        answers = self._collect(timeout)
        failed = sorted((answer for answer in answers.values() if not answer.ok), key=lambda answer: answer.when)
        if failed or len(answers) < self.size:
            report = self._report(failed, [rank for rank in range(self.size) if rank not in answers], timeout)
            self.close()
            raise WorkerError(report)
        if not all(answer.group_alive for answer in answers.values()):
            self.close()  # the function ended the process group, so that the next run needs new processes
        return [answers[rank].value for rank in range(self.size)]

    def close(self) -> None:
        """End the processes; nothing to do if there are none."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, attempts: int = 4) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # for the server: OpenMP reads it when it is loaded
        for rank in range(self.size):
            here, there = context.Pipe()
            arguments = (there, rank, self.size, port, str(self._stacks(rank)))
            process = context.Process(target=_work, args=arguments, name=f"worker {rank} of {self.size}", daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        del os.environ["OMP_NUM_THREADS"]
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
        answers = self._collect(START_SECONDS)
        if len(answers) < self.size or not all(answer.ok for answer in answers.values()):
            report = self._report([a for a in answers.values() if not a.ok], [], START_SECONDS)
            self.close()
            if attempts > 1 and "EADDRINUSE" in report:  # somebody took the port between its choice and its use
                return self._start(attempts - 1)
            raise WorkerError(f"{self.size} worker processes could not be started\n{report}")
        return None

    def _collect(self, timeout: float) -> dict[int, _Answer]:
        """Answers by rank, until all have come or the time is over; a failure shortens the time of the others."""
        answers: dict[int, _Answer] = {}
        end = time.monotonic() + timeout
        while len(answers) < self.size and (left := end - time.monotonic()) > 0:
            open_ones = {self._connections[rank]: rank for rank in range(self.size) if rank not in answers}
            for connection in wait(list(open_ones), timeout=left):
                rank = open_ones[connection]  # type: ignore[index]
                answers[rank] = self._receive(rank)
                if not answers[rank].ok:
                    end = min(end, time.monotonic() + AFTERMATH_SECONDS)
        return answers

    def _receive(self, rank: int) -> _Answer:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            when = time.monotonic()
            self._processes[rank].join()
            stacks = self._stacks(rank).read_text() if self._stacks(rank).exists() else ""
            text = f"the process ended with exit code {self._processes[rank].exitcode} and no answer\n{stacks}"
            return _Answer(rank, False, text, when)

    def _report(self, failed: list[_Answer], silent: list[int], timeout: float) -> str:
        parts = []
        if failed:
            first, *others = failed
            parts.append(f"rank {first.rank} of {self.size} failed:\n{first.value.rstrip()}")
            parts += [f"rank {a.rank} failed after it: {a.value.rstrip().splitlines()[-1]}" for a in others]
        if silent and failed:
            parts.append(f"no answer from ranks {silent} within {AFTERMATH_SECONDS:.0f} s after it")
        elif silent:
            parts.append(f"no answer from ranks {silent} of {self.size} within {timeout} s; what they were doing:")
            parts += [f"rank {rank}:\n{stack}" for rank, stack in self._dump_stacks(silent).items()]
        return "\n\n".join(parts)

    def _stacks(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"rank{rank}.stacks"

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)  # the handler writes at once, whatever the process is busy with
        return {rank: self._stacks(rank).read_text() for rank in ranks}


class _Answer:
    """What a worker says: a value, or the text of a traceback."""

    def __init__(self, rank: int, ok: bool, value: Any, when: float, group_alive: bool = True) -> None:
        self.rank, self.ok, self.value, self.when, self.group_alive = rank, ok, value, when, group_alive


def _work(connection: Connection, rank: int, size: int, port: int, stacks: str) -> None:
    threading.Thread(target=_end_with_parent, name="ends with the parent", daemon=True).start()
    multiprocessing.current_process().daemon = False  # may have children of its own, as data loaders do
    with open(stacks, "w") as stacks_file:
        faulthandler.enable(stacks_file)
        faulthandler.register(signal.SIGUSR1, stacks_file)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "NODE_RANK": 0,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "TORCHELASTIC_RUN_ID": "tests",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "OMP_NUM_THREADS": 1,
        }
        os.environ.update({name: str(value) for name, value in environment.items()})
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch.distributed announces new names
        _answer(connection, rank, _join_group)
        while True:
            try:
                folder, paths, job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            os.chdir(folder)
            sys.path.extend(path for path in paths if path not in sys.path)
            _answer(connection, rank, functools.partial(_call, job))


def _join_group() -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=GROUP_TIMEOUT)


def _call(job: bytes) -> Any:
    import torch

    function, args, kwargs = pickle.loads(job)
    environment = dict(os.environ)
    try:
        return function(*args, **kwargs)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)


def _answer(connection: Connection, rank: int, function: Callable[[], Any]) -> None:
    try:
        value = function()
        alive = sys.modules["torch"].distributed.is_initialized()
        message = pickle.dumps(_Answer(rank, True, value, time.monotonic(), alive))
    except BaseException:
        connection.send_bytes(pickle.dumps(_Answer(rank, False, traceback.format_exc(), time.monotonic())))
        # The end of this process closes its connections, so that ranks which wait for it fail too instead of hanging.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    connection.send_bytes(message)


def _end_with_parent() -> None:
    """However the parent ends, its end of this pipe closes; a worker that is busy or hangs must end too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
