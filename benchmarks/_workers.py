"""Each measured side lives in a process of its own and computes only when it is asked to.

Allocators, compile caches and thread pools of two sides never mix that way. The processes talk in lines of JSON over
pipes; a side that waits sits in ``readline`` and takes no CPU time (each reply says how much it took while waiting).
Run as a script, this file is the worker.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

SIDES = {
    "ours": ("_ours", "OurSide"),
    "peer": ("_peer", "PeerSide"),
    "peak": ("_peak", "MatrixPeak"),
    "trainer": ("_overhead", "TrainerSide"),
    "parallel": ("_parallel_side", "ParallelSide"),
    "checkpoint": ("_checkpoint_side", "CheckpointSide"),
    "conversion": ("_conversion_side", "ConversionSide"),
    "rowwise": ("_rowwise_side", "RowwiseSide"),
}
"""Kind of worker: module and class that it holds. Each method of the class is a command."""

_SETTLE_S = 0.05
"""OpenMP threads spin for some milliseconds after their work before they sleep; the next side starts after that."""


class WorkerError(RuntimeError):
    """A side could not do what it was asked to; the message is the side's own."""


class Worker:
    """A side in its own process.

    The process starts at once and builds its side meanwhile; the first :meth:`ask` waits for it.

    Args:
        kind: one of :data:`SIDES`.
        threads: of OpenMP, BLAS and torch.
        environment: variables that the process gets besides the inherited ones.
        options: arguments of the side's class, plain values.
    """

    def __init__(self, kind: str, threads: int, environment: dict[str, str] | None = None, **options: Any) -> None:
        self.kind = kind
        self.idle_cpu_s = 0.0
        """CPU seconds that the process took while it waited for commands."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # close() closes it
        threading = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, os.path.abspath(__file__), kind, str(threads), json.dumps(options)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | threading | (environment or {}),
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """Call a method of the side and wait for what it returns.

        Raises:
            WorkerError: it raised, or the process ended.
        """
        self.send(command, **arguments)
        return self.receive(command)

    def send(self, command: str, **arguments: Any) -> None:
        """Ask without waiting; :meth:`receive` has to follow."""
        assert self._process.stdin is not None
        # A process that has ended is noticed there.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([command, arguments]) + "\n")
            self._process.stdin.flush()

    def receive(self, command: str) -> Any:
        """Wait for the answer to what was sent.

        Raises:
            WorkerError: the method raised, or the process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-15:])
            raise WorkerError(f"the process of {self.kind!r} ended with status {status} at {command!r}:\n{tail}")
        reply = json.loads(line)
        time.sleep(_SETTLE_S)
        if "error" in reply:
            raise WorkerError(f"{self.kind}: {reply['error']}")
        self.idle_cpu_s += reply["idle_cpu_s"]
        return reply["result"]

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _serve() -> None:
    kind, threads, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    # Whatever a library prints must not end up among the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch

    torch.set_num_threads(threads)
    module, name = SIDES[kind]
    side = getattr(importlib.import_module(module), name)(**options)
    waiting_since = None
    for line in sys.stdin:
        idle_cpu_s = time.process_time() - waiting_since if waiting_since is not None else 0.0
        command, arguments = json.loads(line)
        try:
            reply = {"result": getattr(side, command)(**arguments), "idle_cpu_s": idle_cpu_s}
        except Exception as error:  # the parent decides what a failure means
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        waiting_since = time.process_time()


if __name__ == "__main__":
    _serve()
