"""Signals that ask a run to end: SIGTERM, and the one by which SLURM announces the end of a job's time.

A handler runs between any two lines of Python, on the processes that got the signal, while others may be in the middle
of an exchange. So it makes a note and nothing else. The notes of all processes are added up with what they exchange at
the end of each optimizer step anyway, and between batches of a validation; then all of them do the same at the same
place: save, and end or ask SLURM to start the job again.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from olmoe_lightning._lightning import begin_validation_anew, set_received_sigterm
from olmoe_lightning.parallel.mesh import Axis

_VERSION = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


@dataclass(frozen=True)
class Asked:
    """What signals have asked for."""

    stop: bool = False
    """SIGTERM: the end of the run."""
    requeue: bool = False
    """SLURM's: the job is to be started again."""

    def __bool__(self) -> bool:
        return self.stop or self.requeue


class Signals:
    """What signals ask of the fit under way, from the note in a handler to what all processes do about it."""

    def __init__(self) -> None:
        self._noted = Asked()
        self._requeued = False
        self._batches = 0  # of the validation under way, as many as all processes have at least
        self.saving = False
        """Whether a checkpoint is being saved because of a signal: it must be there before the run ends."""
        self.stopped = False
        """Whether all processes have ended the run together, so that they still answer each other."""

    def begin(self) -> None:
        """A run begins."""
        self._noted = Asked()
        self._requeued = self.stopped = False
        self._batches = 0

    # ---------------------------------------------------------------------------------------------- handlers

    def note_stop(self, signum: int, frame: Any) -> None:
        """Handler of SIGTERM."""
        self._noted = Asked(True, self._noted.requeue)

    def note_requeue(self, signum: int, frame: Any) -> None:
        """Handler of the signal that SLURM was told to send."""
        self._noted = Asked(self._noted.stop, not self._requeued)

    # ---------------------------------------------------------------------------------------------- agreement

    def noted(self) -> tuple[bool, bool]:
        """What this process was asked for, to be added up over all of them."""
        return self._noted.stop, self._noted.requeue

    def agree(self, world: Axis, device: torch.device) -> Asked:
        """What any process was asked for; collective."""
        return Asked(*world.all_reduce(torch.tensor(self.noted(), dtype=torch.int32, device=device)).bool().tolist())

    def begin_validation(self, batches: int, world: Axis, device: torch.device) -> None:
        """Find out how many batches all processes have at least; collective.

        Args:
            batches: of this process; 0 if it does not know.
            world: all processes.
            device: of this process.
        """
        self._batches = int(world.all_reduce(torch.tensor(batches, device=device), dist.ReduceOp.MIN))

    def agree_in_validation(self, world: Axis, device: torch.device) -> Asked:
        """As :meth:`agree`, after a batch of the validation; never, for batches that some processes do not have."""
        self._batches -= 1
        return self.agree(world, device) if self._batches >= 0 else Asked()

    # ---------------------------------------------------------------------------------------------- what is done

    def act(
        self, asked: Asked, trainer: Trainer, environment: ClusterEnvironment | None, validating: bool = False
    ) -> None:
        """Save a checkpoint, and end the run or have the job started again; the same on all processes; collective.

        Args:
            asked: what they agreed on.
            trainer: between two optimizer steps.
            environment: in which the processes were started.
            validating: in the middle of a validation; a run that goes on from here repeats all of it.

        Raises:
            SIGTERMException: the run ends.
            SaveError: the checkpoint could not be written.
        """
        if not asked:
            return
        self._noted = Asked()
        go_on_validating = begin_validation_anew(trainer) if validating else None
        path = checkpoint_path(trainer, environment)
        if path is not None:
            what = "SIGTERM" if asked.stop else "the signal that the job's time ends"
            rank_zero_info(f"Received {what}: saving {path}.")
            self.saving = True
            try:
                trainer.save_checkpoint(path)
            finally:
                self.saving = False
        if asked.requeue and not self._requeued:
            for logger in trainer.loggers:
                logger.finalize("finished")
            self._requeued = trainer.strategy.broadcast(trainer.is_global_zero and requeue())
        if asked.stop:
            set_received_sigterm(trainer)
            self.stopped = True
            raise SIGTERMException
        if go_on_validating is not None:
            go_on_validating()


def evaluation_handlers(trainer: Trainer) -> tuple[Callable[[int, Any], None], Callable[[int, Any], None]]:
    """Handlers of the two signals in a run that changes nothing: it has nothing to save, and ends where it is."""

    def stop(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not trainer.received_sigterm:
            launcher.kill(signum)
        set_received_sigterm(trainer)

    def start_again(signum: int, frame: Any) -> None:
        if trainer.is_global_zero:
            requeue()

    return stop, start_again


def checkpoint_path(trainer: Trainer, environment: ClusterEnvironment | None) -> str | None:
    """Where a run that a signal ends is saved, so that the next one finds it; ``None``: a callback does it, or nothing.

    Under SLURM with automatic requeueing ``hpc_ckpt_N.ckpt`` in ``default_root_dir``, from which Lightning goes on by
    itself. Else the last checkpoint of the first ``ModelCheckpoint``, which is that of ``ckpt_path="last"``.
    """
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        path: str = trainer.strategy.broadcast(next_version(trainer.default_root_dir))
        return path
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            return None
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return last_path(trainer, callback)
    rank_zero_warn("Received SIGTERM: there is no ModelCheckpoint, so no checkpoint is saved.")
    return None


def next_version(folder: str) -> str:
    """The next free ``hpc_ckpt_N.ckpt``. Lightning's own search counts, and stumbles over, other names with digits."""
    files = get_filesystem(folder)
    names = [os.path.basename(path) for path in files.ls(folder, detail=False)] if files.isdir(folder) else []
    versions = [int(match[1]) for name in names if (match := _VERSION.fullmatch(name))]
    return os.path.join(folder, f"hpc_ckpt_{max(versions, default=0) + 1}.ckpt")


def last_path(trainer: Trainer, callback: ModelCheckpoint) -> str:
    """The name under which this callback saved the last checkpoint of this run, or would."""
    if not callback.last_model_path:
        metrics = trainer.callback_metrics | {
            "epoch": torch.tensor(trainer.current_epoch),
            "step": torch.tensor(trainer.global_step),
        }
        path, version = callback.format_checkpoint_name(metrics, callback.CHECKPOINT_NAME_LAST), None
        while callback.file_exists(path, trainer):  # of another run
            version = callback.STARTING_VERSION if version is None else version + 1
            path = callback.format_checkpoint_name(metrics, callback.CHECKPOINT_NAME_LAST, ver=version)
        callback.last_model_path = path  # it is part of what is saved
    return callback.last_model_path


def requeue() -> bool:
    """Ask SLURM to start this job again; whether it will."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{job}_{os.environ['SLURM_ARRAY_TASK_ID']}" if job is not None else os.environ["SLURM_JOB_ID"]
    try:
        done = subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0
    except OSError:
        done = False
    if done:
        rank_zero_info(f"Job {job} was put into SLURM's queue again.")
    else:
        rank_zero_warn(f"Job {job} could not be put into SLURM's queue again: `scontrol requeue {job}` failed.")
    return done
