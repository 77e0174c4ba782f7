"""Saves in the background: a queue of jobs, and host memory for the copies of tensors that they write."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Job:
    work: Callable[[], None]
    name: str
    """For the traceback of an error."""
    cleanup: Callable[[], None] | None
    """Called after the work, also if it fails."""


class SaveQueue:
    """A thread of its own for saving and removing checkpoints. All processes add the same jobs in the same order.

    Args:
        capacity: saves that may be under way at once, the one that is written and those that wait; each holds a copy.
    """

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = threading.Semaphore(capacity)
        self.saving: list[str] = []
        """Names of the saves that are under way."""
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._failed: list[tuple[int, BaseException]] = []
        self._added = 0
        self._reported = 0
        self.ended = 0
        """Jobs that are done or have failed; they end in the order in which they were added."""
        # A process that is being ended must not wait for a save whose partners are gone.
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def unreported(self) -> bool:
        """Whether there are jobs that :meth:`report` has not been asked about; the same on all processes."""
        return self._added > self._reported

    def add(self, work: Callable[[], None], name: str, cleanup: Callable[[], None] | None = None) -> None:
        """Do some work when everything before it is done.

        Args:
            work: what to do.
            name: of it, for the traceback of an error.
            cleanup: called after it, also if it fails.
        """
        self._added += 1
        self._jobs.put(_Job(work, name, cleanup))

    def reserve(self) -> None:
        """Wait until there is capacity for one more save, and take it; to be called before its copy is made."""
        self._capacity.acquire()

    def release(self) -> None:
        """Give back what :meth:`reserve` took: the save could not be added."""
        self._capacity.release()

    def add_save(self, work: Callable[[], None], name: str, cleanup: Callable[[], None]) -> None:
        """Add a save for which :meth:`reserve` has been called; ``cleanup`` is called after it in any case."""

        def ended() -> None:
            cleanup()
            self.saving.remove(name)
            self.release()

        self.saving.append(name)
        self.add(work, f"saving {name}", ended)

    def drain(self) -> None:
        """Return when nothing is left to do."""
        self._jobs.join()

    def report(self, ended: int) -> list[BaseException]:
        """Errors of the first ``ended`` jobs, without those of earlier calls."""
        self._reported = ended
        found = [error for number, error in self._failed if number < ended]
        del self._failed[: len(found)]
        return found

    def close(self, timeout: float | None = None) -> None:
        """End the thread when all is done.

        Args:
            timeout: seconds to wait for it; ``None``: as long as it takes.
        """
        self._jobs.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.work()
            except BaseException as error:  # torch has some that are no Exception; the thread must go on
                error.add_note(f"while {job.name}")
                self._failed.append((self.ended, error))
            finally:
                if job.cleanup is not None:
                    job.cleanup()
                del job  # it holds tensors; the next one may be long in coming
                self.ended += 1
                self._jobs.task_done()
        self._jobs.task_done()


class Copy:
    """Copies of tensors on the CPU, made by a thread of its own.

    Args:
        sources: they must not change until :meth:`join` has returned.
        values: the copies' memory; complete when :meth:`result` has returned.
    """

    def __init__(self, sources: Sequence[Tensor], values: list[Tensor]) -> None:
        self._values = values
        self._error: BaseException | None = None
        device = next((source.device for source in sources if source.is_cuda), None)
        # The copying thread's current stream may be another one: it first waits for what made the values.
        self._made = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._thread = threading.Thread(target=self._run, args=(sources,), name="copy of a checkpoint", daemon=True)
        self._thread.start()

    def _run(self, sources: Sequence[Tensor]) -> None:
        try:
            if self._made is not None:
                self._made.synchronize()
            for target, source in zip(self._values, sources, strict=True):
                target.copy_(source.detach())
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Return when the sources may change."""
        self._thread.join()

    def result(self) -> list[Tensor]:
        """The copies.

        Raises:
            BaseException: what kept them from being made.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self._values


class CopyBuffers:
    """Host memory for copies of tensors. It is kept for the next ones: fresh pages take longer than copying."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._lock = threading.Lock()

    def start(self, tensors: Sequence[Tensor]) -> tuple[Copy, list[Tensor]]:
        """Begin to copy; and the copies' memory, which is the caller's until :meth:`give_back`."""
        with self._lock:
            kept, self._kept = self._kept, []
        fitting = len(kept) == len(tensors) and all(
            old.shape == new.shape and old.dtype == new.dtype for old, new in zip(kept, tensors, strict=True)
        )
        values = kept if fitting else [torch.empty(value.shape, dtype=value.dtype) for value in tensors]
        return Copy(tensors, values), values

    def give_back(self, values: list[Tensor]) -> None:
        """Keep them for the next call; one set, even if several saves overlapped."""
        with self._lock:
            self._kept = values

    def clear(self) -> None:
        """Free what is kept."""
        with self._lock:
            self._kept = []
