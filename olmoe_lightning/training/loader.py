"""Loading: checkpoints of any topology, directories or joined files, into the part that a process holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from olmoe_lightning._lightning import read_directories_by, set_loader_states
from olmoe_lightning.checkpoint import directory as directories
from olmoe_lightning.checkpoint.directory import CorruptCheckpoint
from olmoe_lightning.checkpoint.full import load_full_optimizer_state, load_masters, local_state_dict
from olmoe_lightning.checkpoint.groups import options_of_directory, refuse_other_class
from olmoe_lightning.checkpoint.meta import KEY, MODEL, read_meta, read_whole
from olmoe_lightning.checkpoint.ranges import TrainingState
from olmoe_lightning.checkpoint.record import RunRecord
from olmoe_lightning.checkpoint.rng import restore_random_state
from olmoe_lightning.errors import UserError, shortened
from olmoe_lightning.parallel.layout import unexpanded
from olmoe_lightning.parallel.mesh import Mesh
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer

# Modules of others, and trainers without MoEStrategy, meet directories in ``load_from_checkpoint`` and ``ckpt_path``.
read_directories_by(read_whole)


@dataclass(frozen=True)
class _OptimizerState:
    """What was read for the optimizer along with the weights."""

    state: dict[nn.Parameter, dict[str, Any]]
    options: Sequence[Mapping[str, Any]]


def read_directory(path: Path, weights_only: bool | None, fitting: bool) -> dict[str, Any]:
    """Lightning's dictionary of a directory.

    Args:
        path: of it.
        weights_only: ``False`` trusts it.
        fitting: whether a run is to go on from it.

    Raises:
        UserError: it is none, or a run cannot go on from it.
    """
    checkpoint = read_meta(path, weights_only)
    if fitting and "optimizer_states" not in checkpoint:
        raise UserError(
            f"{path} holds weights without the state of a training run; start from them with "
            "OLMoE(pretrained=...) (--model.pretrained), or load them into your module, instead of with ckpt_path"
        )
    return checkpoint


class Loader:
    """Reads a checkpoint in the order in which Lightning asks for its parts."""

    def __init__(self) -> None:
        self.weights_only: bool | None = None
        """What the Trainer was told of the run's checkpoint; Lightning keeps it from strategies that load it late."""
        self._optimizer: _OptimizerState | None = None
        self._random: dict[str, Any] | None = None  # of a run that goes on in the middle of an epoch

    def choose_own(self, checkpoint: Mapping[str, Any], mesh: Mesh) -> None:
        """Put the states of this process' data loaders into Lightning's dictionary, which has those of rank 0.

        Raises:
            UserError: there are other data ranks, whose loaders they say nothing of.
        """
        record = _record(checkpoint)
        states = record.own_states.loaders_of(mesh, record.topology) if record is not None else None
        if states is not None:
            set_loader_states(checkpoint, states)

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool, state: TrainingState, resuming: bool) -> None:
        """Fill weights and masters, and read the optimizer's state if a run goes on; collective.

        Args:
            checkpoint: Lightning's dictionary.
            strict: whether module and checkpoint must have the same tensors.
            state: of this process, to be filled.
            resuming: whether a run goes on, so that the optimizer's state is wanted too.

        Raises:
            CorruptCheckpoint: it is damaged, or holds another model.
            UserError: the optimizer has other groups.
        """
        record = _record(checkpoint)
        if record is not None and record.directory:
            self._load_directory(record, strict, state, resuming)
            return
        local = local_state_dict(state.ownership, checkpoint["state_dict"])
        if record is not None:
            joined = replace(
                record.own_states, other={name: local[name] for name in state.ownership.other if name in local}
            )
            local |= joined.other_of(state.ownership.mesh, record.topology)
        with unexpanded(state.ownership.tensors.values()):
            state.ownership.module.load_state_dict(local, strict=strict)
        if state.sharded is not None:
            load_masters(state.sharded, local)

    def _load_directory(self, record: RunRecord, strict: bool, state: TrainingState, resuming: bool) -> None:
        directory, world = Path(record.directory), state.ownership.mesh.world
        there = directories.index_of(directory)
        options, refused = _options(state.sharded, record) if resuming else (None, "")
        wanted: dict[str, list[int]] = {}
        refusals = []
        for shapes, refusal in world.all_gather_objects((state.ownership.shapes, refused)):
            wanted |= shapes
            refusals += [refusal] if refusal else []
        saved = {name: list(shape) for name, shape in record.shapes.items()}
        problems = directories.differences(wanted, saved, strict)
        problems += [f"without values: {name.removeprefix(MODEL)}" for name in record.tensors if name not in there]
        if problems:
            raise CorruptCheckpoint(f"{directory} does not fit the model: {shortened(problems)}")
        if refusals:  # stages have different groups, and what one refuses all refuse
            raise UserError(refusals[0])
        ranges, finish = state.model_to_read()
        ranges = [part for part in ranges if part.name in there]
        self._optimizer = None
        if options is not None:
            more, entries = state.optimizer_to_read(there, record.scalars)
            ranges += more
            self._optimizer = _OptimizerState(entries, options)
        directories.load(directory, ranges, world.group)
        finish()
        other = record.own_states.other_of(state.ownership.mesh, record.topology)
        if other:
            state.ownership.module.load_state_dict(other, strict=False)

    def load_optimizer(self, checkpoint: Mapping[str, Any], sharded: ShardedOptimizer) -> None:
        """Give the optimizer its state: what was read with the weights, or the part of a joined file."""
        record = _record(checkpoint)
        if not checkpoint["optimizer_states"]:
            self._optimizer = None
            rank_zero_warn(
                "The checkpoint was written outside of a fit and has no state of an optimizer: training goes on from "
                "its weights with a fresh one."
            )
            return
        if record is None or not record.directory:
            load_full_optimizer_state(sharded, checkpoint["optimizer_states"][0])
            return
        found, self._optimizer = self._optimizer, None
        if found is not None:
            sharded.load_state(found.state, found.options)

    def load_progress(self, checkpoint: Mapping[str, Any], mesh: Mesh, device: torch.device) -> int | None:
        """Go on with the random numbers of this rank; of other processes' checkpoints, with new, reproducible ones.

        Returns:
            The optimizer steps that were skipped; ``None`` if another strategy wrote the checkpoint.
        """
        record = _record(checkpoint)
        if record is None:
            return None
        self._random = record.own_states.random_of(mesh, record.topology)
        restore_random_state(self._random, record.random[0], mesh.rank, device)
        return record.skipped_steps

    def begin_batch(self, batch_idx: int, mesh: Mesh, device: torch.device) -> None:
        """In the middle of an epoch, making the iterator of the data took numbers that the first run did not take."""
        state, self._random = self._random, None
        if state is not None and batch_idx > 0:
            restore_random_state(state, state, mesh.rank, device)


def _record(checkpoint: Mapping[str, Any]) -> RunRecord | None:
    return RunRecord.read(checkpoint[KEY]) if KEY in checkpoint else None


def _options(sharded: ShardedOptimizer | None, record: RunRecord) -> tuple[list[dict[str, Any]] | None, str]:
    """The saved options of each group of the optimizer here, if there is one; and why it cannot go on."""
    if sharded is None:
        return None, ""
    try:
        refuse_other_class(sharded.optimizer, record.optimizer)
        return options_of_directory(sharded, list(record.param_groups), record.group_of), ""
    except UserError as error:
        return None, str(error)
