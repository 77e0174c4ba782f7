"""Saving: when, where and in which thread checkpoints are written, and what happens when one fails."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from olmoe_lightning._lightning import loader_states
from olmoe_lightning.checkpoint.background import Copy, CopyBuffers, SaveQueue
from olmoe_lightning.checkpoint.directory import Range
from olmoe_lightning.checkpoint.groups import groups_of_parameters, options_of_groups
from olmoe_lightning.checkpoint.meta import KEY
from olmoe_lightning.checkpoint.per_rank import OwnState
from olmoe_lightning.checkpoint.publish import clean, remove
from olmoe_lightning.checkpoint.record import FORMAT, RankRecord, RunRecord
from olmoe_lightning.checkpoint.rng import capture_random_state
from olmoe_lightning.checkpoint.trust import Untrusted, advice, names_of, untrusted
from olmoe_lightning.errors import UserError, shortened
from olmoe_lightning.parallel.mesh import Axis, Mesh
from olmoe_lightning.parallel.ownership import Ownership
from olmoe_lightning.training.named_saves import NamedSaves
from olmoe_lightning.training.snapshot import (
    MANIFEST,
    SavedRun,
    SaveError,
    Snapshot,
    not_finite_of,
    refuse_non_finite,
    share,
    write_snapshot,
)

log = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0


class Saver:
    """Writes checkpoints, one after another, the same ones on all processes.

    Args:
        state_dict_type: see :class:`~olmoe_lightning.MoEStrategy`.
        async_save: see there.
        on_save_error: see there.

    Raises:
        UserError: a value is not one of those.
    """

    def __init__(
        self,
        state_dict_type: Literal["sharded", "full"],
        async_save: bool | Literal["overlap"],
        on_save_error: Literal["raise", "warn"],
    ) -> None:
        self._state_dict_type, self._async_save = state_dict_type, async_save
        self._on_save_error = on_save_error
        self._check()
        self._mesh = Mesh.single()
        self._device = torch.device("cpu")
        self._timeout = timedelta(minutes=30)
        self._axis: Axis | None = None  # of saves in the background, with a process group of their own
        self._queue: SaveQueue | None = None
        self._buffers = CopyBuffers()
        self._copy: Copy | None = None  # the last one
        self._last_failed = False
        self._background_open = False  # from the start of a run to the moment at which saves are waited for last
        self._cleaned: set[Path] = set()  # folders without left-overs of killed saves
        self._manifest: dict[str, Any] | None = None
        self._untrusted: set[str] = set()  # where in checkpoints of this run there is what is not loaded without trust
        self._named = NamedSaves()

    def _check(self) -> None:
        for name, value, allowed in (
            ("state_dict_type", self._state_dict_type, ("sharded", "full")),
            ("on_save_error", self._on_save_error, ("raise", "warn")),
        ):
            if value not in allowed:
                raise UserError(f"{name} ({value!r}) must be {allowed[0]!r} or {allowed[1]!r}")
        if self._async_save not in (False, True, "overlap"):
            raise UserError(f"async_save ({self._async_save!r}) must be False, True or 'overlap'")
        if self._async_save and self.full:
            raise UserError("async_save=True needs state_dict_type='sharded': a joined file is written by rank 0 alone")

    @property
    def full(self) -> bool:
        """Whether a checkpoint is one file."""
        return self._state_dict_type == "full"

    @property
    def state_dict_type(self) -> Literal["sharded", "full"]:
        """Of the next checkpoint."""
        return self._state_dict_type

    @state_dict_type.setter
    def state_dict_type(self, value: Literal["sharded", "full"]) -> None:
        self._state_dict_type = value
        self._check()

    @property
    def async_save(self) -> bool | Literal["overlap"]:
        """Of the next checkpoint."""
        return self._async_save

    @async_save.setter
    def async_save(self, value: bool | Literal["overlap"]) -> None:
        self._async_save = value
        self._check()

    @property
    def on_save_error(self) -> Literal["raise", "warn"]:
        """What a failed save does."""
        return self._on_save_error

    @on_save_error.setter
    def on_save_error(self, value: Literal["raise", "warn"]) -> None:
        self._on_save_error = value
        self._check()

    # ---------------------------------------------------------------------------------------------- a run

    def clean_folders(self, folders: Iterable[Any]) -> None:
        """Remove what killed saves have left; on rank 0, before Lightning looks for the last checkpoint."""
        self._cleaned = set()
        for folder in folders:
            if folder is not None and "://" not in str(folder):
                self._clean(Path(folder))

    def open(self, mesh: Mesh, device: torch.device, timeout: timedelta) -> None:
        """Make ready for the saves of a run.

        Args:
            mesh: its processes.
            device: of this process.
            timeout: of the collectives.
        """
        self._mesh, self._device, self._timeout = mesh, device, timeout
        self._manifest = None
        self._untrusted = set()
        self._background_open = True

    def end_background(self) -> None:
        """From here to the start of the next run saves are written at once: nothing would wait for later ones."""
        self._background_open = False

    def _background_axis(self) -> Axis:
        """All processes, in a group of their own: training goes on in the others'; collective when it is made."""
        world = self._mesh.world
        if self._axis is None or self._axis.ranks != world.ranks:
            group = dist.new_group(backend="gloo", timeout=self._timeout) if world.size > 1 else None
            self._axis = Axis("saves", world.ranks, world.rank, group)
        return self._axis

    def close(self, interrupted: bool) -> None:
        """At the end of a run; one that was interrupted does not wait long for partners that may be gone."""
        self.end_background()
        self.finish_copy()
        self._copy = None
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close(_JOIN_SECONDS if interrupted else None)
            for error in queue.report(queue.ended):
                log.error(f"{self._mesh}: {error}")
        self._buffers.clear()
        self._named.clear()
        axis, self._axis = self._axis, None
        if axis is not None and axis.group is not None and not interrupted:
            dist.destroy_process_group(axis.group)

    def call_hook(self, callback: Checkpoint, hook: Callable[[], None]) -> None:
        """Call a hook of a checkpoint callback; a save that fails in it is not what the callback calls best or last."""
        self._named.watch(callback, hook, self._report)

    def is_queued(self, path: Any) -> bool:
        """Whether a save of this name is under way in the background."""
        return self._queue is not None and str(path) in self._queue.saving

    # ---------------------------------------------------------------------------------------------- one save

    def refuse(self, path: Any) -> None:
        """Say that a process that failed writes no checkpoint; what this one was to replace stays."""
        log.error(
            f"{self._mesh}: no checkpoint was written to {path}: a process failed, and a checkpoint needs all of them"
        )
        self._last_failed = True

    def save_file(self, checkpoint: dict[str, Any], path: Any, run: SavedRun, write: Callable[..., None]) -> None:
        """One file, by rank 0; if it cannot be written all processes know; collective.

        Args:
            checkpoint: Lightning's dictionary, with all tensors on rank 0.
            path: of the file.
            run: what is saved with it.
            write: gets the whole dictionary and the path.
        """
        self._last_failed = True
        states = self._mesh.world.gather_objects(self._own_state(checkpoint, run.state.ownership))
        record = RunRecord(FORMAT, asdict(self._mesh.shape), run.skipped_steps)
        trained = {n for n, tensor in run.state.ownership.tensors.items() if run.state.ownership.is_trained(tensor)}

        def write_it() -> list[Untrusted]:
            refuse_non_finite(not_finite_of(checkpoint, trained), path)
            if "://" not in str(path):
                self._clean(Path(path).parent)
            whole = checkpoint | {KEY: record.joined_entry(states)}
            write(whole, path)
            return untrusted(whole)

        try:
            found = share(path, write_it, self._mesh.world)
            self._last_failed = False
            self._warn_untrusted(path, found)
        except SaveError as error:
            self._end_hook(error)

    def save_directory(self, checkpoint: dict[str, Any], path: Any, storage_options: Any, run: SavedRun) -> None:
        """A directory, by all processes; now, or in the background if there will be an end to wait for; collective.

        Args:
            checkpoint: Lightning's dictionary.
            path: of the directory.
            storage_options: of the Trainer's call; there must be none.
            run: what is saved with it.

        Raises:
            UserError: it is to be in a place that has no folders.
            SaveError: it could not be written, or an earlier one in the background.
        """
        if "://" in str(path) or storage_options is not None:
            raise UserError(
                f"a sharded checkpoint needs a folder that all processes share, not {path} with storage_options "
                f"{storage_options}; take such a folder, or MoEStrategy(state_dict_type='full')"
            )
        if self.async_save and run.fitting and self._background_open:
            self.raise_failed()
            self._save_later(Path(path), self._snapshot(checkpoint, run))
            return
        if self._queue is not None:
            self._queue.drain()
        try:
            self._write(Path(path), self._snapshot(checkpoint, run), self._mesh.world)
        except SaveError as error:
            self._end_hook(error)

    def _snapshot(self, checkpoint: dict[str, Any], run: SavedRun) -> Snapshot:
        state, sharded, ownership = run.state, run.state.sharded, run.state.ownership
        ranges = state.model_to_write()
        own = RankRecord(ownership.shapes, ownership.aliases, self._own_state(checkpoint, ownership))
        if "optimizer_states" in checkpoint and sharded is not None:
            more, own.scalars, own.problems = state.optimizer_to_write()
            ranges += more
            own.optimizer = type(sharded.optimizer).__name__
            own.param_groups = options_of_groups(sharded.optimizer)
            own.group_of = groups_of_parameters(sharded)
        if self._manifest is None and self._mesh.rank == 0:  # asks git and the data; once for all checkpoints of a run
            self._manifest = self._make_manifest(run)
        return Snapshot(
            ranges,
            {name for name, tensor in ownership.tensors.items() if ownership.is_trained(tensor)},
            own,
            RunRecord(FORMAT, asdict(self._mesh.shape), run.skipped_steps),
            checkpoint | {"state_dict": {}},  # it lies beside this dictionary
            self._manifest or {},
        )

    def _own_state(self, checkpoint: Mapping[str, Any], ownership: Ownership) -> OwnState:
        loaders = loader_states(checkpoint)
        random = capture_random_state(self._device)
        return OwnState(random, loaders, ownership.other, [n for n in ownership.other if ownership.of_experts(n)])

    def _make_manifest(self, run: SavedRun) -> dict[str, Any]:
        try:
            return run.manifest()
        except Exception as error:  # of a third party's data module, on rank 0: no reason to lose a checkpoint
            rank_zero_warn(f"Checkpoints of this run have an empty {MANIFEST}: {type(error).__name__}: {error}")
            return {}

    def _save_later(self, target: Path, snapshot: Snapshot) -> None:
        """Copy what training goes on to change, and let the queue write it."""
        if self._queue is None:
            self._queue = SaveQueue()
        queue = self._queue
        queue.reserve()
        try:
            own = snapshot.own
            own.param_groups, own.own = copy.deepcopy((own.param_groups, own.own))
            if self._mesh.rank == 0:  # only rank 0 writes it
                snapshot.checkpoint, snapshot.manifest = copy.deepcopy((snapshot.checkpoint, snapshot.manifest))
            else:
                snapshot.checkpoint = {}
            # The optimizer changes its own at its next step, others may change at once.
            sources = [
                part.values if snapshot.updated_by_optimizer(part) else part.values.clone() for part in snapshot.ranges
            ]
            self._copy, values = self._buffers.start(sources)
            if self.async_save != "overlap" or not snapshot.trained:
                self.finish_copy()
            snapshot.ranges = [
                Range(part.name, part.size, part.start, value)
                for part, value in zip(snapshot.ranges, values, strict=True)
            ]
            write = partial(self._write, target, snapshot, self._background_axis(), self._copy)
            queue.add_save(write, str(target), partial(self._buffers.give_back, values))
            self._named.queue(target)
        except BaseException:
            queue.release()
            raise

    def finish_copy(self) -> None:
        """Return when weights and optimizer state may change; a save in the background may still be copying them."""
        if self._copy is not None:
            self._copy.join()

    def _write(self, target: Path, snapshot: Snapshot, axis: Axis, copying: Copy | None = None) -> None:
        """On all processes, in this thread or another; until it has succeeded, nothing that it replaces is removed."""
        self._last_failed = True
        try:
            found = write_snapshot(snapshot, target, axis, self._clean, copying)
        except SaveError as error:
            error.path = str(target)
            raise
        self._last_failed = False
        self._warn_untrusted(target, found)

    def _warn_untrusted(self, path: Any, values: list[Untrusted]) -> None:
        """Say what a checkpoint that was written holds that is not loaded without trust; once a run for each value."""
        found = [each for each in values if each.place not in self._untrusted]
        self._untrusted.update(each.place for each in found)
        if found:
            rank_zero_warn(
                f"{path} was written, but is not loaded without trust: {shortened(list(map(str, found)), 5)}. To load "
                f"it, {advice(names_of(found))}. Numbers, strings, lists, dictionaries and tensors need neither."
            )

    def _clean(self, folder: Path) -> None:
        """Remove what killed saves have left in a folder; once a run, on rank 0, which alone makes such things."""
        if folder in self._cleaned:
            return
        self._cleaned.add(folder)
        try:
            removed = clean(folder)
        except OSError as error:
            rank_zero_warn(f"What interrupted saves may have left in {folder} could not be removed: {error}")
            return
        if removed:
            rank_zero_info(
                f"Removed from {folder} what interrupted saves had left: {shortened([p.name for p in removed])}"
            )

    # ---------------------------------------------------------------------------------------------- errors

    def _report(self, error: SaveError) -> None:
        """Raise or warn, as the user wants it."""
        if self.on_save_error == "raise":
            raise error
        rank_zero_warn(f"{error}. Training goes on.")

    def _end_hook(self, error: SaveError) -> None:
        """Leave the hook of a checkpoint callback, which is to remember nothing of it; else report the error here."""
        if self._named.watching:
            raise error
        self._report(error)

    def raise_failed(self) -> None:
        """Report saves in the background that have failed meanwhile; all processes at the same step; collective.

        They see the end of a save at slightly different moments. So as long as one is under way, they agree at each
        step on those that have ended for all of them.
        """
        queue = self._queue
        if queue is None or not queue.unreported:
            return
        ended = torch.tensor(queue.ended, device=self._device)
        errors = queue.report(int(self._mesh.world.all_reduce(ended, dist.ReduceOp.MIN)))
        for error in errors:
            if isinstance(error, SaveError):
                self._named.forget(error.path)
        for error in errors[1:]:
            log.error(f"{self._mesh}: {error}")
        if errors and isinstance(errors[0], SaveError):
            self._report(errors[0])
        elif errors:
            raise errors[0]

    def finish(self) -> None:
        """Wait for saves in the background; collective.

        Raises:
            SaveError: one failed, and ``on_save_error`` is ``"raise"``.
        """
        if self._queue is not None:
            self._queue.drain()
            self.raise_failed()

    # ---------------------------------------------------------------------------------------------- old ones

    def remove(self, path: Any, remove_file: Callable[[Any], None]) -> None:
        """Delete an old checkpoint; not if the save that was to replace it has failed.

        Args:
            path: of a directory or a file.
            remove_file: for files.
        """
        if "://" in str(path) or self.full:
            self._remove(path, remove_file)
        elif self._queue is not None:
            self._queue.add(partial(self._remove, Path(path), remove), f"removing {path}")
        else:
            self._remove(Path(path), remove)

    def _remove(self, path: Any, remove_it: Callable[[Any], None]) -> None:
        if self._last_failed:
            rank_zero_warn(f"{path} is kept, because the last checkpoint could not be written.")
        elif self._mesh.rank == 0:
            try:
                remove_it(path)
            except OSError as error:  # one too many is no reason to stop, and the other processes do not know of it
                rank_zero_warn(f"The old checkpoint {path} could not be removed: {error}")
