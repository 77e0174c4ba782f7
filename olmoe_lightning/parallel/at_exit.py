"""The end of the interpreter: torch's own threads must be done with Python by then.

A collective over gloo is carried out by a thread of its process group. That thread lets go of the tensors a moment
after their result is there, and letting go of one that Python knows takes the interpreter's lock. A script whose last
collective is followed by its end within milliseconds (a pipeline's ``fit``, a metric that is summed on the last line)
may begin to shut the interpreter down in between. CPython then ends the thread where it waits for the lock, inside of a
destructor, and C++ gives up: "terminate called without an active exception", SIGABRT, an exit status other than 0 after
a good run. No reference that Python could drop earlier changes that, so :func:`settle` waits for these threads instead.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_WORKERS = "pt_gloo_runloop"
"""What torch calls the threads that carry out collectives over gloo."""
_LOOKS = 3
"""A thread that has just begun to wait for the lock looks idle; it gets the lock, and is seen, between two looks."""
_LOOK_SECONDS = 0.002
_SECONDS = 2.0
"""Until the wait is given up: a run that failed may have left a collective behind that has no end."""
_TASKS = Path("/proc/self/task")


def settle_at_exit() -> None:
    """Have :func:`settle` called at the end of the interpreter."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle(states: Callable[[], list[str]] | None = None) -> None:
    """Let the threads of process groups finish, also of groups that were destroyed; a few milliseconds.

    Args:
        states: the states of these threads, as Linux names them; ``S`` is idle.
    """
    states = states or worker_states
    end, idle = time.monotonic() + _SECONDS, 0
    while idle < _LOOKS and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)  # without the lock: whoever waits for it gets it
        idle = idle + 1 if all(state == "S" for state in states()) else 0


def worker_states() -> list[str]:
    """State of each of this process' gloo threads; empty where the system does not show its threads."""
    found = []
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError):  # it has just ended
                if (task / "comm").read_text().strip() == _WORKERS:
                    found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found
