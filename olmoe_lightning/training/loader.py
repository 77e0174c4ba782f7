"""Loading under Lightning: checkpoints of any topology, sharded or joined, into the part that a process holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from olmoe_lightning.checkpoint import sharded as directories
from olmoe_lightning.checkpoint.full import (
    group_options,
    load_full_optimizer_state,
    load_masters,
    local_state_dict,
    refuse_other_groups,
)
from olmoe_lightning.checkpoint.meta import KEY, MODEL, read_meta
from olmoe_lightning.checkpoint.ranges import TrainingState
from olmoe_lightning.checkpoint.rng import restore_random_state
from olmoe_lightning.checkpoint.sharded import CorruptCheckpoint
from olmoe_lightning.errors import UserError, shortened
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer
from olmoe_lightning.parallel.weight_waits import WeightWaits
from olmoe_lightning.training.experts import ExpertStrategy, is_expert


class LoadingStrategy(ExpertStrategy):
    """What of :class:`~olmoe_lightning.MoEStrategy` reads checkpoints.

    Args:
        args: of :class:`ExpertStrategy`.
        kwargs: of :class:`ExpertStrategy`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sharded: ShardedOptimizer | None = None
        """The optimizer's mechanics while fitting."""
        self._waits: WeightWaits | None = None
        self.skipped_steps = 0
        """Optimizer steps that were skipped because something was not finite."""
        self._resumed_random_state: dict[str, Any] | None = None
        self._optimizer_state: dict[str, Any] | None = None  # read along with the weights, given when asked for

    def wait_for_weights(self) -> None:
        """Return when the weights of the last optimizer step have arrived from the other processes."""
        if self.sharded is not None:
            self.sharded.finish_gather()

    def _settle(self) -> None:
        """Wait for weights that are on their way, and make buffers equal."""
        self.wait_for_weights()
        if self.lightning_module is not None:
            self._equalise_buffers(self.lightning_module)

    def _equalise_buffers(self, module: nn.Module) -> None:
        """Buffers (running statistics) are those of the first data rank, as under DDP."""
        for buffer in module.buffers():
            if buffer.numel() and buffer.device.type != "meta":
                self.mesh.data.broadcast(buffer.data)

    def _close_optimizer(self) -> None:
        """Forget the optimizer of a run that is over."""
        if self._waits is not None:
            self._waits.close()
            self._waits = None
        if self.sharded is not None:
            self.sharded.close()
            self.sharded = None

    def _training_state(self) -> TrainingState:
        module = self.lightning_module
        assert module is not None
        return TrainingState(module, self.mesh, self.sharded, is_expert)

    def _topology(self) -> dict[str, int]:
        shape = self.mesh.shape
        return {"pipeline": shape.pipeline, "expert_replica": shape.expert_replica, "expert": shape.expert}

    # ---------------------------------------------------------------------------------------------- loading

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if not path.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        meta = read_meta(path, weights_only)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" not in meta:  # type: ignore[union-attr]
            raise UserError(
                f"{path} holds weights without the state of a training run; start from them with "
                "OLMoE(pretrained=...) (--model.pretrained), or load them into your module, instead of with ckpt_path"
            )
        return meta

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        self.wait_for_weights()
        if module.trainer.state.fn != TrainerFn.FITTING:
            self._close_optimizer()  # of an earlier fit: its masters are not those of the weights that come now
        if KEY in checkpoint and "directory" in checkpoint[KEY]:
            self._load_model(checkpoint[KEY], strict)
            return
        local = local_state_dict(module, self.mesh, is_expert, checkpoint["state_dict"])
        module.load_state_dict(local, strict=strict)
        if self.sharded is not None:
            load_masters(self.sharded, local)

    def _load_model(self, meta: Mapping[str, Any], strict: bool) -> None:
        directory = Path(meta["directory"])
        state = self._training_state()
        there = directories.index_of(directory)
        options, refused = self._options(meta)
        wanted: dict[str, list[int]] = {}
        refusals = []
        for shapes, refusal in _gather_everywhere((state.shapes(), refused), self._world_group()):
            wanted |= shapes
            refusals += [refusal] if refusal else []
        saved = {name: list(shape) for name, shape in meta["shapes"].items()}
        problems = directories.differences(wanted, saved, strict)
        problems += [f"without values: {name.removeprefix(MODEL)}" for name in meta["tensors"] if name not in there]
        if problems:
            raise CorruptCheckpoint(f"{directory} does not fit the model: {shortened(problems)}")
        if refusals:  # stages have different groups, and what one refuses all refuse
            raise UserError(refusals[0])
        ranges, finish = state.model_to_read()
        ranges = [part for part in ranges if part.name in there]
        entries: dict[nn.Parameter, dict[str, Any]] = {}
        if options is not None:
            more, entries = state.optimizer_to_read(there, meta["scalars"])
            ranges += more
        directories.load(directory, ranges, self._world_group())
        finish()
        self._optimizer_state = None if options is None else self._numbered(entries, options)
        module = self.lightning_module
        assert module is not None
        if meta["other"]:
            module.load_state_dict(meta["other"], strict=False)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if KEY in checkpoint:
            self.skipped_steps = int(checkpoint[KEY]["skipped_steps"])
            self._restore_random_state(checkpoint[KEY])
        if KEY not in checkpoint or "directory" not in checkpoint[KEY]:
            if self.sharded is None:
                super().load_optimizer_state_dict(checkpoint)
            else:
                load_full_optimizer_state(self.sharded, checkpoint["optimizer_states"][0])
            return
        state, self._optimizer_state = self._optimizer_state, None
        if self.sharded is not None and state is not None:
            self.sharded.optimizer.load_state_dict(state)

    def _options(self, meta: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, str]:
        """The saved options of each group of the optimizer here, if it goes on; and why it cannot."""
        module = self.lightning_module
        assert module is not None
        if self.sharded is None or module.trainer.state.fn != TrainerFn.FITTING:
            return None, ""
        try:
            refuse_other_groups(self.sharded, meta["group_of"])
            return group_options(self.sharded, meta["param_groups"]), ""
        except ValueError as error:
            return None, str(error)

    def _numbered(self, state: Mapping[nn.Parameter, dict[str, Any]], options: list[dict[str, Any]]) -> dict[str, Any]:
        """What the optimizer takes: its parameters by number, in the order of its groups."""
        assert self.sharded is not None
        ids: dict[Any, int] = {}
        for group in self.sharded.optimizer.param_groups:
            for master in group["params"]:
                ids[master] = len(ids)
        groups = [
            {**saved, "params": [ids[master] for master in group["params"]]}
            for saved, group in zip(options, self.sharded.optimizer.param_groups, strict=True)
        ]
        return {"state": {ids[master]: entries for master, entries in state.items()}, "param_groups": groups}

    def _world_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.mesh.world.size > 1 else None

    # ---------------------------------------------------------------------------------------------- random numbers

    def _restore_random_state(self, meta: Mapping[str, Any]) -> None:
        """Go on with the numbers of this rank. Another number of processes starts new, reproducible ones."""
        states = meta["random"]
        same = len(states) == self.mesh.world.size and self._topology() == meta["topology"]
        self._resumed_random_state = states[self.mesh.rank] if same else None
        restore_random_state(self._resumed_random_state, states[0], self.mesh.rank, self.root_device)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        state, self._resumed_random_state = self._resumed_random_state, None
        if state is not None and batch_idx > 0:
            # In the middle of an epoch: making the iterator of the data took numbers that the first run did not take.
            restore_random_state(state, state, self.mesh.rank, self.root_device)
        super().on_train_batch_start(batch, batch_idx)


def _gather_everywhere(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found
