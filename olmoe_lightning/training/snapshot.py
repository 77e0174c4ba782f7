"""What one process saves at one moment, and the steps by which all processes write it together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from olmoe_lightning.checkpoint import directory as directories
from olmoe_lightning.checkpoint.background import Copy
from olmoe_lightning.checkpoint.directory import Range
from olmoe_lightning.checkpoint.manifest import write_json
from olmoe_lightning.checkpoint.meta import KEY, META, MODEL
from olmoe_lightning.checkpoint.publish import publish, temporary_beside
from olmoe_lightning.checkpoint.ranges import OPTIMIZER, TrainingState
from olmoe_lightning.checkpoint.record import RankRecord, RunRecord
from olmoe_lightning.checkpoint.trust import Untrusted, untrusted
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.mesh import Axis

MANIFEST = "manifest.json"
"""Of a checkpoint, beside its tensors."""
_SLICE = 2**20


class SaveError(RuntimeError):
    """A checkpoint was not written; what was there before is untouched. The same on all processes."""

    path = ""
    """Of the checkpoint, where it was written in the background."""


@dataclass(frozen=True)
class SavedRun:
    """What of a run is saved besides Lightning's dictionary.

    Args:
        state: of weights and optimizer.
        skipped_steps: so far.
        fitting: whether there will be an end of training at which saves in the background are waited for.
        manifest: builds the manifest; called once a run, on rank 0.
    """

    state: TrainingState
    skipped_steps: int
    fitting: bool
    manifest: Callable[[], dict[str, Any]]


@dataclass
class Snapshot:
    """What one process saves at one moment.

    Args:
        ranges: of tensors.
        trained: names of the model's tensors that the optimizer, and nothing else, changes.
        own: what rank 0 needs to know of this process.
        run: what all processes know.
        checkpoint: Lightning's dictionary, without tensors; needed on rank 0.
        manifest: needed on rank 0.
    """

    ranges: list[Range]
    trained: set[str]
    own: RankRecord
    run: RunRecord
    checkpoint: dict[str, Any]
    manifest: dict[str, Any]

    def updated_by_optimizer(self, part: Range) -> bool:
        """Whether the optimizer, and nothing else, changes a range: what is trained, and its state."""
        return part.name.startswith(OPTIMIZER) or part.name.removeprefix(MODEL) in self.trained


def write_snapshot(
    snapshot: Snapshot, target: Path, axis: Axis, clean: Callable[[Path], None], copying: Copy | None = None
) -> list[Untrusted]:
    """Write, make durable, publish; on all processes, in this thread or another.

    Args:
        snapshot: what is written.
        target: the checkpoint's name.
        axis: all processes, in a group in which nothing else communicates now.
        clean: called on rank 0 with the folder, before anything is written there.
        copying: by which the ranges get their values, if it may still be going on.

    Returns:
        What it holds that is not loaded without trust.

    Raises:
        SaveError: it did not work, and the target is as it was.
    """
    own = snapshot.own
    try:
        if copying is not None:
            copying.result()
        own.not_finite = sorted(
            {p.name for p in snapshot.ranges if snapshot.updated_by_optimizer(p) and not is_finite(p.values)}
        )
    except Exception as error:  # shared below: all ranks must call the collectives of this save
        own.failed = f"rank {axis.rank}: {type(error).__name__}: {error}"
    everyone = axis.gather_objects(own)
    temporary = Path(share(target, partial(_begin, target, everyone, clean), axis))
    try:
        try:
            directories.save(temporary, snapshot.ranges, axis.group)
        except directories.WriteError as error:
            raise SaveError(f"no checkpoint was written to {target}: {error}") from error
        found: list[Untrusted] = share(target, partial(_publish, temporary, target, snapshot, everyone), axis)
    except BaseException:
        if axis.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return found


def _begin(target: Path, everyone: list[RankRecord], clean: Callable[[Path], None]) -> str:
    """On rank 0: may there be a checkpoint, and where is it written first?"""
    failed = [each.failed for each in everyone if each.failed]
    if failed:
        raise SaveError(f"no checkpoint was written to {target}: {'; '.join(failed[:3])}")
    problems = [problem for each in everyone for problem in each.problems]
    if problems:
        raise SaveError(
            f"no checkpoint was written to {target}: {problems[0]}, and experts of several processes have no such "
            "state together; take an optimizer whose state is element by element, or expert_parallel_size=1"
        )
    refuse_non_finite(sorted({name for each in everyone for name in each.not_finite}), target)
    clean(target.parent)
    return str(temporary_beside(target))


def _publish(temporary: Path, target: Path, snapshot: Snapshot, everyone: list[RankRecord]) -> list[Untrusted]:
    """On rank 0: what is not tensors, and then all of it under its name."""
    index = directories.SafeReader(temporary).read_metadata()
    lost = sorted({info.relative_path for info in index.storage_data.values()} - {p.name for p in temporary.iterdir()})
    if lost:
        raise SaveError(
            f"no checkpoint was written to {target}: {', '.join(lost[:3])} of other processes cannot be seen from rank "
            "0; all nodes must share the folder"
        )
    entry = snapshot.run.entry(everyone, sorted(index.state_dict_metadata))
    whole = snapshot.checkpoint | {KEY: entry}
    torch.save(whole, temporary / META)
    write_json(temporary / MANIFEST, snapshot.manifest)
    publish(temporary, target)
    return untrusted(whole)


def share(target: Any, action: Callable[[], Any], axis: Axis) -> Any:
    """What the first process of an axis found by ``action``, on all of them; its failure, of any kind, is everyone's.

    Args:
        target: the checkpoint, for the message.
        action: called on the first process.
        axis: the processes.

    Raises:
        SaveError: it failed.
    """
    found, problem, cause = None, None, None
    if axis.rank == 0:
        try:
            found = action()
        except Exception as error:  # torch.save raises all kinds, and the others must not be left waiting
            cause, problem = error, str(error)
            if not isinstance(error, SaveError):
                kind = "" if isinstance(error, OSError | UserError) else f"{type(error).__name__}: "
                problem = f"no checkpoint was written to {target}: {kind}{error}"
    found, problem = axis.broadcast_object((found, problem))
    if problem is not None:
        raise SaveError(problem) from cause
    return found


def refuse_non_finite(names: list[str], target: Any) -> None:
    """Stop before values that are not finite are published.

    Raises:
        SaveError: some are.
    """
    if names:
        raise SaveError(
            f"no checkpoint was written to {target}: {len(names)} tensors have values that are not finite, "
            f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        )


def not_finite_of(checkpoint: Mapping[str, Any], trained: Collection[str]) -> list[str]:
    """Names of what is trained, and of its optimizer state, that is not finite in Lightning's dictionary."""
    names = [n for n, value in checkpoint["state_dict"].items() if n in trained and not is_finite(value)]
    for optimizer in checkpoint.get("optimizer_states", ()):
        known = optimizer.get("names", {})
        names += [
            f"{OPTIMIZER}{known.get(number, number)}.{key}"
            for number, entries in optimizer.get("state", {}).items()
            for key, value in entries.items()
            if isinstance(value, Tensor) and not is_finite(value)
        ]
    return sorted(names)


def is_finite(values: Tensor) -> bool:
    """Whether all are; what is not finite makes the sum so, which is read once and takes no memory."""
    if not values.is_floating_point() or bool(values.sum().isfinite()):
        return True
    return all(bool(part.isfinite().all()) for part in values.split(_SLICE))  # a sum can also overflow
