"""One process that fails, or has waited in vain, ends all of a run: under every launcher, and with a stack of each.

A process that fails says so in the store by which the processes found each other. A thread in each of the others looks
there a few times a second. It acknowledges, shows what its process is doing if that does not end by itself, and ends it
if it goes on all the same, say in a loop without exchanges. A process of the same machine that does not even
acknowledge (stopped, or inside of a library that keeps Python's lock) is ended from outside.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from olmoe_lightning._torch import default_store
from olmoe_lightning.parallel.mesh import Mesh

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""From one look into the store to the next; a failure takes as long to be acknowledged."""
STACK_SECONDS = 2.0
"""How long a process has to fail by itself, as most do when a partner's connections close; then it shows its stack."""
END_SECONDS = 5.0
"""From there until it is ended."""
SILENT_SECONDS = 10.0
"""How long a process may fail to acknowledge."""
_KILL_SECONDS = 2.0


@dataclass(frozen=True)
class Process:
    """A process, as others of its machine can find it."""

    machine: str
    pid: int
    token: str

    @classmethod
    def own(cls) -> Process:
        """This one."""
        try:
            space = os.stat("/proc/self/ns/pid").st_ino  # process ids mean something in one container alone
        except OSError:
            space = 0
        return cls(f"{socket.gethostname()}/{space}", os.getpid(), secrets.token_hex(4))


class Alarm:
    """Tells the other processes of a run that this one failed, and learns it of them.

    Args:
        mesh: their mesh, of at least two; collective when it is made.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._processes: Sequence[Process] = mesh.world.all_gather_objects(Process.own())
        self._store = default_store()
        self._key = f"olmoe_lightning/failed/{self._processes[0].token}"
        self._over = threading.Event()
        self._shows_crashes = not faulthandler.is_enabled()
        if self._shows_crashes:
            with suppress(AttributeError, OSError, RuntimeError, ValueError):  # a terminal that is no file, or none
                faulthandler.enable()
        self._thread = threading.Thread(target=self._watch, name="alarm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The run of this process is over, however it ended."""
        self._over.set()
        with suppress(RuntimeError):  # the store has gone with the process that kept it
            self._acknowledge()  # whoever fails later must not wait for this one
        self._thread.join(_KILL_SECONDS)
        if self._shows_crashes:
            faulthandler.disable()
            self._shows_crashes = False

    # ---------------------------------------------------------------------------------------------- this one failed

    def sound(self, message: str) -> None:
        """Tell all others, and end those of this machine that do not acknowledge.

        Args:
            message: who failed, and why.
        """
        self._over.set()
        own = self._mesh.rank
        others = {
            rank: process.pid
            for rank, process in enumerate(self._processes)
            if rank != own and process.machine == self._processes[own].machine
        }
        for rank, pid in others.items():
            if state_of(pid) == "T":
                log.error(f"rank {rank} (process {pid}) is stopped, and is ended")
                end_processes([pid])
        with suppress(RuntimeError):
            self._store.set(self._key, message)
            self._acknowledge()
            end = time.monotonic() + SILENT_SECONDS
            silent = others
            while silent and time.monotonic() < end:
                silent = {
                    rank: pid
                    for rank, pid in silent.items()
                    if state_of(pid) is not None and not self._store.check([f"{self._key}/{rank}"])
                }
                time.sleep(0.02)
            for rank, pid in silent.items():
                log.error(f"rank {rank} (process {pid}) does not answer, and is ended")
            end_processes(list(silent.values()))

    def _acknowledge(self) -> None:
        self._store.set(f"{self._key}/{self._mesh.rank}", "")

    # ---------------------------------------------------------------------------------------------- another one failed

    def _watch(self) -> None:
        with suppress(RuntimeError):
            while not self._over.wait(LOOK_SECONDS):
                if self._store.check([self._key]):
                    self._acknowledge()
                    self._end(self._store.get(self._key).decode(errors="replace"))

    def _end(self, message: str) -> None:
        if self._over.wait(STACK_SECONDS):
            return
        print(f"{self._mesh} is still running although {message}. What it is doing:", file=sys.stderr, flush=True)
        show_stacks()
        if not self._over.wait(END_SECONDS):
            print(f"{self._mesh} is ended.", file=sys.stderr, flush=True)
            os._exit(1)


def show_stacks() -> None:
    """Print the stacks of all threads of this process."""
    if sys.__stderr__ is not None:
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # a terminal that is no file
            faulthandler.dump_traceback(sys.__stderr__)


def state_of(pid: int) -> str | None:
    """``T`` of a process that was stopped; ``None`` of one that has ended. Systems without /proc know only whether."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return None if state in "ZX" else state
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "?" if not Path("/proc/self/stat").exists() else None


def end_processes(pids: Sequence[int], ended: Callable[[int], bool] = lambda pid: state_of(pid) is None) -> None:
    """End processes of this machine, whatever they are doing; those that can show their stacks.

    Args:
        pids: of the processes.
        ended: whether one has ended.
    """
    for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped process gets the first with the second
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    end = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < end and not all(ended(pid) for pid in pids):
        time.sleep(0.02)
    for pid in pids:
        if not ended(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
