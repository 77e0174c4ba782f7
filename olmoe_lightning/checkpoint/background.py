"""Saves in the background: work that is done one after another, and the memory in which tensors wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class SaveQueue:
    """A thread of its own for saving and removing checkpoints. All processes add the same work in the same order.

    Args:
        room: saves that may be under way at once, the one that is written and those that wait; each holds a copy.
    """

    def __init__(self, room: int = 2) -> None:
        self._room = threading.Semaphore(room)
        self.saving: list[str] = []
        """Names of the saves that are under way."""
        self._jobs: queue.Queue[tuple[Callable[[], None], str, Callable[[], None] | None] | None] = queue.Queue()
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

    def add(self, job: Callable[[], None], name: str, finally_: Callable[[], None] | None = None) -> None:
        """Do it when everything before it is done.

        Args:
            job: what to do.
            name: for the traceback of an error.
            finally_: called after it, also if it fails.
        """
        self._added += 1
        self._jobs.put((job, name, finally_))

    def wait_for_room(self) -> None:
        """Return when one more save may be added; to be called before its copy is made."""
        self._room.acquire()

    def give_room(self) -> None:
        """Take :meth:`wait_for_room` back: the save could not be added."""
        self._room.release()

    def add_save(self, job: Callable[[], None], name: str, finally_: Callable[[], None]) -> None:
        """Add a save for which :meth:`wait_for_room` has been called; ``finally_`` is called after it in any case."""

        def ended() -> None:
            finally_()
            self.saving.remove(name)
            self._room.release()

        self.saving.append(name)
        self.add(job, f"saving {name}", ended)

    def drain(self) -> None:
        """Return when nothing is left to do."""
        self._jobs.join()

    def report(self, ended: int) -> list[BaseException]:
        """Errors of the first ``ended`` jobs, without those of earlier calls."""
        self._reported = ended
        found = [error for number, error in self._failed if number < ended]
        del self._failed[: len(found)]
        return found

    def close(self, patience: float | None = None) -> None:
        """End the thread when all is done.

        Args:
            patience: seconds to wait for it; ``None``: as long as it takes.
        """
        self._jobs.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, name, finally_ = job
            try:
                work()
            except BaseException as error:  # torch has some that are no Exception; the thread must go on
                error.add_note(f"while {name}")
                self._failed.append((self.ended, error))
            finally:
                if finally_ is not None:
                    finally_()
                del job, work, finally_  # they hold tensors; the next job may be long in coming
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
        # A thread has a stream of its own choice: it must come after what made the values.
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
