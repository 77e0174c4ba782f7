"""Several processes on this machine, as torchrun would start them: for parity, tests and benchmarks.

    def double(rank_times: int) -> int:  # at the top of a module
        return rank_times * torch.distributed.get_rank()

    with Workers(2) as workers:
        assert workers.run(double, 2) == [0, 2]

The processes wait for functions to run together. They are forked from a server that has imported torch and Lightning
once, so that new ones are there in a moment after a failure. A function that fails or hangs is shown with its stack.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

GROUP_TIMEOUT = datetime.timedelta(seconds=60)
START_SECONDS = 120
PRELOAD = ("torch", "lightning.pytorch")
AFTERMATH_SECONDS = 5.0
"""How long the other ranks have to notice that one has failed, before they are killed."""
_SHOWN_LINES = 60
_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "NODE_RANK", "GROUP_", "ROLE_")


def free_port() -> int:
    """A TCP port of this machine that no program uses at the moment; another one may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives to process ``rank`` of ``size`` on one machine."""
    values = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "NODE_RANK": 0,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "TORCHELASTIC_RUN_ID": "local",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in values.items()}


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what SLURM, torchrun or Lightning have left in it, which would make a process a rank."""
    return {name: value for name, value in environment.items() if not name.startswith(_LAUNCHERS)}


class WorkerError(RuntimeError):
    """A function failed, died or hung in at least one worker; the message holds the output of each rank."""


class Workers:
    """``size`` processes of one thread each; started at the first run, and again after a failure.

    Args:
        size: number of processes.
        backend: of the process group that they join at the start; ``None`` leaves that to the functions.
        quiet: keep what they print for the report of a failure.
        environment: their variables; by default those of the first worker of this program.
        preload: modules that are imported once, before the first process of this program is forked.
    """

    def __init__(
        self,
        size: int,
        backend: str | None = "gloo",
        quiet: bool = False,
        environment: Mapping[str, str] | None = None,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self.size = size
        self._environment = environment
        self._backend, self._quiet, self._preload = backend, quiet, list(preload)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order; empty while nothing is running."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` in every process at once, in the current folder.

        Args:
            function: defined at the top of a module; asks ``torch.distributed`` for its rank.
            *args: pickled, the same for every rank.
            timeout: seconds, after which the processes are ended; the stacks of those without an answer are shown.
            **kwargs: as ``args``.

        Returns:
            What each rank returned, in rank order.

        Raises:
            WorkerError: a rank raised (its traceback is in the message), ended, or did not answer in time.
        """
        __tracebackhide__ = True
        self.begin(function, *args, **kwargs)
        return self.results(timeout)

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """As :meth:`run`, without waiting; :meth:`results` has to follow."""
        job = pickle.dumps((function, args, kwargs))
        if not self._processes:
            self._start()
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # one that has ended is found by results()
                connection.send_bytes(pickle.dumps((os.getcwd(), sys.path, job)))

    def results(self, timeout: float = 60) -> list[Any]:
        """What the function that has begun returns on each rank; arguments and errors are those of :meth:`run`."""
        __tracebackhide__ = True
        answers = self._collect(timeout)
        failed = sorted((answer for answer in answers.values() if not answer.ok), key=lambda answer: answer.when)
        if failed or len(answers) < self.size:
            report = self._report(failed, [rank for rank in range(self.size) if rank not in answers], timeout)
            self.close()
            raise WorkerError(report)
        if self._backend is not None and not all(answer.group_alive for answer in answers.values()):
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
        port = free_port()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # for the server: OpenMP reads it when it is loaded
        for rank in range(self.size):
            here, there = context.Pipe()
            inherited = None if self._environment is None else dict(self._environment)
            torchrun = torchrun_environment(rank, self.size, port)
            arguments = (there, rank, inherited, torchrun, self._backend, str(self._output(rank)), self._quiet)
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
            if attempts > 1 and "EADDRINUSE" in report:  # another program took the port between its choice and its use
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
            answer: _Answer = pickle.loads(self._connections[rank].recv_bytes())
            return answer
        except (EOFError, ConnectionResetError):
            when = time.monotonic()
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            text = f"the process ended with exit code {code} and no answer\n{self._printed(rank)}"
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
            parts.append(f"no answer from ranks {silent} of {self.size} within {timeout:.3g} s; what they were doing:")
            parts += [f"rank {rank}:\n{stack}" for rank, stack in self._dump_stacks(silent).items()]
        return "\n\n".join(parts)

    def _output(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"rank{rank}.txt"

    def _printed(self, rank: int) -> str:
        """The stacks of a process, below what it printed if it is quiet."""
        text = self._output(rank).read_text(errors="replace") if self._output(rank).exists() else ""
        return "\n".join(text.splitlines()[-_SHOWN_LINES:])

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)  # the handler writes at once, whatever the process is busy with
        return {rank: self._printed(rank) for rank in ranks}


class _Answer:
    """What a worker sends back: a value, or the text of a traceback."""

    def __init__(self, rank: int, ok: bool, value: Any, when: float, group_alive: bool = True) -> None:
        self.rank, self.ok, self.value, self.when, self.group_alive = rank, ok, value, when, group_alive


def _work(
    connection: Connection,
    rank: int,
    inherited: dict[str, str] | None,
    torchrun: dict[str, str],
    backend: str | None,
    output: str,
    quiet: bool,
) -> None:
    threading.Thread(target=_end_with_parent, name="ends with the parent", daemon=True).start()
    multiprocessing.current_process().daemon = False  # may have children of its own, as data loaders do
    with open(output, "a") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        if quiet:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        variables = without_launcher(os.environ if inherited is None else inherited)
        os.environ.clear()
        os.environ.update(variables | torchrun | {"OMP_NUM_THREADS": "1"})
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch.distributed announces new names
        _answer(connection, rank, functools.partial(_join_group, backend))
        while True:
            try:
                folder, paths, job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            os.chdir(folder)
            sys.path.extend(path for path in paths if path not in sys.path)
            _answer(connection, rank, functools.partial(_call, job))


def _join_group(backend: str | None) -> None:
    import torch

    torch.set_num_threads(1)
    if backend is not None:
        torch.distributed.init_process_group(backend, timeout=GROUP_TIMEOUT)


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
