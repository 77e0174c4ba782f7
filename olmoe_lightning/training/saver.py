"""Saving under Lightning: a directory to which every process writes its own part, or one file joined on rank 0."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from olmoe_lightning.checkpoint import sharded as directories
from olmoe_lightning.checkpoint.background import Copy, CopyBuffers, SaveQueue
from olmoe_lightning.checkpoint.full import (
    full_optimizer_state,
    full_state_dict,
    groups_of_parameters,
    named_groups,
)
from olmoe_lightning.checkpoint.manifest import build_manifest
from olmoe_lightning.checkpoint.meta import FORMAT, KEY
from olmoe_lightning.checkpoint.publish import clean, remove, temporary_beside
from olmoe_lightning.checkpoint.rng import capture_random_state
from olmoe_lightning.checkpoint.sharded import Range
from olmoe_lightning.errors import UserError, shortened
from olmoe_lightning.training.experts import is_expert
from olmoe_lightning.training.loader import LoadingStrategy
from olmoe_lightning.training.save_steps import (
    MANIFEST,
    SaveError,
    gather,
    is_finite,
    is_optimizer_s,
    publish_parts,
    share,
)

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 10.0


class CheckpointStrategy(LoadingStrategy):
    """The checkpoints' part of :class:`~olmoe_lightning.MoEStrategy`.

    Args:
        args: of :class:`LoadingStrategy`.
        state_dict_type: see :class:`~olmoe_lightning.MoEStrategy`.
        async_save: see there.
        on_save_error: see there.
        kwargs: of :class:`LoadingStrategy`.
    """

    def __init__(
        self,
        *args: Any,
        state_dict_type: Literal["sharded", "full"],
        async_save: bool | Literal["overlap"],
        on_save_error: Literal["raise", "warn"],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value, allowed in (
            ("state_dict_type", state_dict_type, ("sharded", "full")),
            ("on_save_error", on_save_error, ("raise", "warn")),
        ):
            if value not in allowed:
                raise UserError(f"{name} ({value!r}) must be {allowed[0]!r} or {allowed[1]!r}")
        if async_save not in (False, True, "overlap"):
            raise UserError(f"async_save ({async_save!r}) must be False, True or 'overlap'")
        if async_save and state_dict_type == "full":
            raise UserError("async_save=True needs state_dict_type='sharded': a joined file is written by rank 0 alone")
        self.state_dict_type = state_dict_type
        self.async_save = async_save
        self.on_save_error = on_save_error
        self._queue: SaveQueue | None = None
        self._buffers = CopyBuffers()
        self._copy: Copy | None = None  # the last one
        self._save_group: dist.ProcessGroup | None = None
        self._last_save_failed = False
        self._cleaned: set[Path] = set()  # folders without left-overs of killed saves
        self._manifest: dict[str, Any] | None = None  # of this run, on rank 0

    # ---------------------------------------------------------------------------------------------- saving

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The own part of this process; of ``full`` checkpoints all experts, in fp32 if trained, on rank 0."""
        module = self.lightning_module
        assert module is not None
        if not self._interrupted:
            self._settle()
        if self._interrupted or self.state_dict_type == "sharded":
            return module.state_dict()
        return full_state_dict(module, self.mesh, self.sharded, is_expert)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.state_dict_type == "sharded":
            return {}
        if self.sharded is None or self._interrupted:
            return super().optimizer_state(optimizer) if self.sharded is None else {}
        return full_optimizer_state(self.sharded)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._interrupted:
            log.error(
                f"{self.mesh}: no checkpoint was written to {filepath}: a process failed, and a checkpoint needs "
                "all of them"
            )
            self._last_save_failed = True  # what this one was to replace stays
            return
        if self.state_dict_type == "full":
            self._save_file(checkpoint, filepath, storage_options)
            return
        if "://" in str(filepath) or storage_options is not None:
            raise UserError(
                f"a sharded checkpoint needs a folder that all processes share, not {filepath} with storage_options "
                f"{storage_options}; take such a folder, or MoEStrategy(state_dict_type='full')"
            )
        self._settle()
        if self.async_save and self._is_fitting():
            self._raise_failed_saves()
            ranges, own, rest = self._snapshot(checkpoint)
            queue = self._save_queue()
            queue.reserve()
            try:
                self._save_later(queue, Path(filepath), ranges, own, rest)
            except BaseException:
                queue.release()
                raise
            return
        if self._queue is not None:
            self._queue.drain()
        try:
            self._write(Path(filepath), *self._snapshot(checkpoint))
        except SaveError as error:
            self._report(error)

    def _save_later(
        self, queue: SaveQueue, filepath: Path, ranges: list[Range], own: dict[str, Any], rest: dict[str, Any]
    ) -> None:
        """Copy what training goes on to change, and let the queue write it."""
        own["param_groups"], own["other"] = copy.deepcopy((own["param_groups"], own["other"]))
        rest = copy.deepcopy(rest) if self.is_global_zero else {}  # only rank 0 writes it
        # The optimizer changes its own at its next step, others may change at once.
        sources = [part.values if is_optimizer_s(part, own) else part.values.clone() for part in ranges]
        self._copy, values = self._buffers.start(sources)
        if self.async_save != "overlap" or self.sharded is None:
            self.finish_copy()
        ranges = [Range(part.name, part.size, part.start, value) for part, value in zip(ranges, values, strict=True)]
        write = partial(self._write, filepath, ranges, own, rest, self._copy)
        queue.add_save(write, str(filepath), partial(self._buffers.give_back, values))

    def _save_file(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        """One file, by rank 0; if it cannot be written all processes know."""
        self._last_save_failed = True
        random = capture_random_state(self.root_device)
        states = gather({"random": random}, self.mesh.rank, self.mesh.world.size, self._world_group())
        own = {"format": FORMAT, "topology": self._topology(), "skipped_steps": self.skipped_steps}
        checkpoint = checkpoint | {KEY: own | {"random": [state["random"] for state in states]}}
        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        try:
            share(filepath, write, self.mesh.rank, self._world_group())
            self._last_save_failed = False
        except SaveError as error:
            self._report(error)

    def _is_fitting(self) -> bool:
        """Whether there will be an end of training at which saves in the background are waited for."""
        state = self.lightning_module.trainer.state  # type: ignore[union-attr]
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    def _snapshot(self, checkpoint: dict[str, Any]) -> tuple[list[Range], dict[str, Any], dict[str, Any]]:
        """What is to be written: ranges of tensors, what rank 0 needs to know of this process, and Lightning's part."""
        state = self._training_state()
        ranges = state.model_to_write()
        own: dict[str, Any] = {
            "shapes": state.shapes(),
            "aliases": state.aliases,
            "other": state.other,
            "random": capture_random_state(self.root_device),
            "scalars": {},
            "param_groups": {},
            "group_of": {},
            "problems": [],
            "trained": state.trained_names(),
        }
        if "optimizer_states" in checkpoint and self.sharded is not None:
            more, own["scalars"], own["problems"] = state.optimizer_to_write()
            ranges += more
            own["param_groups"] = named_groups(self.sharded)
            own["group_of"] = groups_of_parameters(self.sharded)
        checkpoint = checkpoint | {
            "state_dict": {},  # it lies beside this dictionary
            KEY: {"format": FORMAT, "topology": self._topology(), "skipped_steps": self.skipped_steps},
        }
        if self._manifest is None and self.is_global_zero:  # asks git and the data; once for all checkpoints of a run
            self._manifest = self._make_manifest()
        return ranges, own, {"checkpoint": checkpoint, "manifest": self._manifest}

    def _make_manifest(self) -> dict[str, Any]:
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        try:
            return build_manifest(trainer, trainer.lightning_module)
        except Exception as error:  # of a stranger's data module, on rank 0 alone: no reason to lose a checkpoint
            rank_zero_warn(f"Checkpoints of this run have an empty {MANIFEST}: {type(error).__name__}: {error}")
            return {}

    def finish_copy(self) -> None:
        """Return when weights and optimizer state may change; a save in the background may still be copying them."""
        if self._copy is not None:
            self._copy.join()

    @override
    def _settle(self) -> None:
        self.finish_copy()
        super()._settle()

    def _write(
        self,
        target: Path,
        ranges: list[Range],
        own: dict[str, Any],
        rest: dict[str, Any],
        copy: Copy | None = None,
    ) -> None:
        """Write, make durable, publish; on all processes, in this thread or another.

        Args:
            target: the checkpoint's name.
            ranges: what this process writes.
            own: what rank 0 needs to know of this process.
            rest: Lightning's part, on rank 0.
            copy: by which the ranges get their values, if it may still be going on.

        Raises:
            SaveError: it did not work, and the target is as it was.
        """
        self._last_save_failed = True
        group, rank = self._group_for_saving(), self.mesh.rank
        own = own | {"bad": [], "failed": ""}
        try:
            if copy is not None:
                copy.result()
            own["bad"] = sorted(
                {part.name for part in ranges if is_optimizer_s(part, own) and not is_finite(part.values)}
            )
        except Exception as error:  # the others are told: each save of theirs must meet the same one of this process
            own["failed"] = f"rank {rank}: {type(error).__name__}: {error}"
        everyone = gather(own, rank, self.mesh.world.size, group)
        temporary = Path(share(target, partial(self._begin, target, everyone), rank, group))
        try:
            try:
                directories.save(temporary, ranges, group)
            except directories.WriteError as error:
                raise SaveError(f"no checkpoint was written to {target}: {error}") from error
            share(target, partial(publish_parts, temporary, target, everyone, rest), rank, group)
            self._last_save_failed = False
        except BaseException:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _begin(self, target: Path, everyone: list[dict[str, Any]]) -> str:
        """On rank 0: may there be a checkpoint, and where is it written first?"""
        failed = [each["failed"] for each in everyone if each["failed"]]
        if failed:
            raise SaveError(f"no checkpoint was written to {target}: {'; '.join(failed[:3])}")
        problems = [problem for each in everyone for problem in each["problems"]]
        if problems:
            raise SaveError(
                f"no checkpoint was written to {target}: {problems[0]}, and experts of several processes have no such "
                "state together; take an optimizer whose state is element by element, or expert_parallel_size=1"
            )
        bad = sorted({name for each in everyone for name in each["bad"]})
        if bad:
            raise SaveError(
                f"no checkpoint was written to {target}: {len(bad)} tensors have values that are not finite, "
                f"{', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}"
            )
        self._clean(target.parent)
        return str(temporary_beside(target))

    @override
    def _before_launch(self, trainer: Trainer) -> None:
        """Put in order what killed runs have left, before Lightning looks for the last checkpoint."""
        super()._before_launch(trainer)
        self._cleaned = set()
        if getattr(rank_zero_only, "rank", 0) == 0 and self.state_dict_type == "sharded":
            for callback in trainer.checkpoint_callbacks:
                folder = getattr(callback, "dirpath", None)
                if folder is not None and "://" not in str(folder):
                    self._clean(Path(folder))

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

    def _group_for_saving(self) -> dist.ProcessGroup | None:
        if self.mesh.world.size == 1:
            return None
        return self._save_group if self.async_save else dist.group.WORLD

    def _save_queue(self) -> SaveQueue:
        if self._queue is None:
            self._queue = SaveQueue()
        return self._queue

    def _open_save_group(self) -> None:
        """Make ready for the saves of a run; collective. Those in the background get a group of their own."""
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        self._manifest = None
        if self.async_save and self.mesh.world.size > 1 and self._save_group is None:
            self._save_group = dist.new_group(backend="gloo", timeout=self.timeout)
        if self.async_save:
            for callback in trainer.checkpoint_callbacks:
                self._count_queued_as_there(callback)

    def _count_queued_as_there(self, callback: Any) -> None:
        """ModelCheckpoint takes another name where there is a file already; one that is being written counts."""
        exists = getattr(type(callback), "file_exists", None)
        if exists is None:
            return

        def file_exists(filepath: Any, trainer: Trainer) -> bool:
            saving = self._queue is not None and str(filepath) in self._queue.saving
            queued = self.reduce_boolean_decision(saving, all=False)
            return bool(exists(callback, filepath, trainer)) or queued

        callback.file_exists = file_exists

    def _report(self, error: SaveError) -> None:
        """Raise or warn, as the user wants it."""
        if self.on_save_error == "raise":
            raise error
        rank_zero_warn(f"{error}. Training goes on.")

    def _raise_failed_saves(self) -> None:
        """Tell of saves in the background that have failed meanwhile; all processes at the same step.

        They see the end of a save at slightly different moments. So as long as one is under way, they agree at each
        step on those that have ended for all of them.
        """
        queue = self._queue
        if queue is None or not queue.unreported:
            return
        ended = queue.ended
        if self.mesh.world.size > 1:
            fewest = torch.tensor(ended, device=self.root_device)
            dist.all_reduce(fewest, dist.ReduceOp.MIN)
            ended = int(fewest)
        errors = queue.report(ended)
        for error in errors[1:]:
            log.error(f"{self.mesh}: {error}")
        if errors and isinstance(errors[0], SaveError):
            self._report(errors[0])
        elif errors:
            raise errors[0]

    def finish_saves(self) -> None:
        """Wait for saves in the background; collective.

        Raises:
            SaveError: one failed, and ``on_save_error`` is ``"raise"``.
        """
        if self._queue is not None:
            self._queue.drain()
            self._raise_failed_saves()

    def _close_saves(self) -> None:
        """At the end of a run; one that was interrupted does not wait long for partners that may be gone."""
        self.finish_copy()
        self._copy = None
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close(_PATIENCE_SECONDS if self._interrupted else None)
            for error in queue.report(queue.ended):
                log.error(f"{self.mesh}: {error}")
        self._buffers.clear()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete an old one; not if the save that was to replace it has failed."""
        if "://" in str(filepath) or self.state_dict_type == "full":
            self._remove(filepath, super().remove_checkpoint)
        elif self._queue is not None:
            self._queue.add(partial(self._remove, Path(filepath), remove), f"removing {filepath}")
        else:
            self._remove(Path(filepath), remove)

    def _remove(self, path: Any, remove_it: Callable[[Any], None]) -> None:
        if self._last_save_failed:
            rank_zero_warn(f"{path} is kept, because the last checkpoint could not be written.")
        elif self.is_global_zero:
            try:
                remove_it(path)
            except OSError as error:  # one too many is no reason to stop, and the other processes do not know of it
                rank_zero_warn(f"The old checkpoint {path} could not be removed: {error}")

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.finish_saves()
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._raise_failed_saves()
        super().on_train_batch_start(batch, batch_idx)
