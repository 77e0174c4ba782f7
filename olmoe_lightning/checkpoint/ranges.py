"""Weights, masters and optimizer state of one process as ranges of global tensors, whatever the mesh.

A tensor's global name is that of the module, with global layer numbers; the experts of all ranks are one tensor along
its first dimension. Flattened, what a process holds of it is one range: buckets, shards and stages do not show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from olmoe_lightning.checkpoint.directory import Range
from olmoe_lightning.checkpoint.meta import MODEL
from olmoe_lightning.parallel.buffers import Bucket, Shard
from olmoe_lightning.parallel.layout import flattened, lies_flat, write
from olmoe_lightning.parallel.mesh import Axis
from olmoe_lightning.parallel.ownership import Ownership
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer

OPTIMIZER = "optimizer."


class TrainingState:
    """What one process writes and reads of it.

    Args:
        ownership: of the module's tensors.
        sharded: the optimizer, if the module trains.
    """

    def __init__(self, ownership: Ownership, sharded: ShardedOptimizer | None) -> None:
        self.ownership = ownership
        self.sharded = sharded

    # ---------------------------------------------------------------------------------------------- writing

    def model_to_write(self) -> list[Range]:
        """What this process writes of the model: fp32 masters of what is trained, the rest as it is."""
        sharded = self.sharded
        found = self._shards_to_write(
            MODEL, lambda shard, _: None if sharded is None else flattened(sharded.values(shard))
        )
        for name, value in self.ownership.tensors.items():
            if not self.ownership.is_trained(value):
                whole = flattened(value.detach())
                found.append(self._own_part(MODEL + name, value, whole, 0, self.ownership.replicas(value)))
        return found

    def optimizer_to_write(self) -> tuple[list[Range], dict[str, dict[str, Any]], list[str]]:
        """What this process writes of the optimizer's state: ranges, scalars by parameter and key; and what it cannot.

        State that is neither one number nor one for each element (row and column sums, for example) belongs to a whole
        parameter, and so to no process where the experts are spread.
        """
        ranges: list[Range] = []
        scalars: dict[str, dict[str, Any]] = {}
        problems: list[str] = []
        if self.sharded is None:
            return ranges, scalars, problems
        state = self.sharded.optimizer.state
        keys: dict[str, None] = {}
        numbers: dict[tuple[torch.dtype, Any], Tensor] = {}  # most parameters are at the same step: kept once

        def kept(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            copy = item.detach().cpu().clone()
            return copy if copy.ndim else numbers.setdefault((copy.dtype, copy.item()), copy)

        for _, parameter, index in self.sharded.parameters:
            name = self.ownership.name(parameter)
            shard = self.sharded.shards.get(index)
            for key, item in state.get(shard.master, {}).items() if shard is not None else ():
                assert shard is not None
                if is_range(item, shard.master):
                    keys[key] = None
                    continue
                if (
                    isinstance(item, Tensor)
                    and item.ndim
                    and self.ownership.is_expert(parameter)
                    and self.ownership.mesh.expert.size > 1
                ):
                    problems.append(f"{key} of {name} has the shape {list(item.shape)}, not that of the parameter")
                scalars.setdefault(name, {})[key] = kept(item)
        for key in keys:

            def entry(shard: Shard, parameter: nn.Parameter, key: str = key) -> Tensor | None:
                item = state.get(shard.master, {}).get(key)
                return flattened(item) if item is not None and is_range(item, shard.master) else None

            ranges += self._shards_to_write(OPTIMIZER, entry, f".{key}")
        return ranges, scalars, problems

    def _shards_to_write(
        self, prefix: str, values: Callable[[Shard, nn.Parameter], Tensor | None], suffix: str = ""
    ) -> list[Range]:
        found: list[Range] = []
        if self.sharded is None:
            return found
        whole = {shard.number for group in self.sharded.groups if _replicated(group) for shard in group.shards}
        for _, parameter, index in self.sharded.parameters:
            shard = self.sharded.shards.get(index)
            value = values(shard, parameter) if shard is not None else None
            if shard is None or value is None:
                continue
            axis = self.sharded.axis_of[parameter] if index in whole else None
            name = prefix + self.ownership.name(parameter) + suffix
            found.append(self._own_part(name, parameter, value, shard.start, axis))
        return found

    def _own_part(self, name: str, tensor: Tensor, flat: Tensor, start: int, axis: Axis | None) -> Range:
        """A range of ``tensor``, of which each of the processes that all hold it writes an equal part."""
        if axis is not None:
            begin, end = (flat.numel() * rank // axis.size for rank in (axis.rank, axis.rank + 1))
            flat, start = flat[begin:end], start + begin
        return Range(name, self.ownership.size(tensor), self.ownership.start(tensor) + start, flat)

    # ---------------------------------------------------------------------------------------------- reading

    def model_to_read(self) -> tuple[list[Range], Callable[[], None]]:
        """Where values of the model are read to, and what is to be called when they are there."""
        found: list[Range] = []
        copies: list[tuple[Tensor, Tensor]] = []

        def place(value: Tensor) -> Tensor:
            """The values themselves, or a place from which they are copied in the end."""
            if lies_flat(value):
                return value.detach().view(-1)
            # A copy, not empty: what a checkpoint does not have stays as it is.
            copies.append((value.detach(), flattened(value.detach()).clone().view(value.shape)))
            return copies[-1][1].view(-1)

        if self.sharded is not None:
            for _, parameter, index in self.sharded.parameters:
                shard = self.sharded.shards.get(index)
                if shard is not None:
                    name = MODEL + self.ownership.name(parameter)
                    start = self.ownership.start(parameter) + shard.start
                    found.append(Range(name, self.ownership.size(parameter), start, place(shard.master)))
        for name, value in self.ownership.tensors.items():
            if not self.ownership.is_trained(value):
                found.append(Range(MODEL + name, self.ownership.size(value), self.ownership.start(value), place(value)))

        def finish() -> None:
            for target, source in copies:
                write(target, source)
            if self.sharded is not None:
                self.sharded.start_gather()  # the compute weights, from everyone's masters
                self.sharded.finish_gather()

        return found, finish

    def optimizer_to_read(
        self, there: Mapping[str, Any], scalars: Mapping[str, Mapping[str, Any]]
    ) -> tuple[list[Range], dict[nn.Parameter, dict[str, Any]]]:
        """Where the optimizer's state is read to, and that state by master, with its scalars.

        Args:
            there: names of the tensors of the checkpoint.
            scalars: by parameter and key.
        """
        assert self.sharded is not None
        keys: dict[str, list[str]] = {}
        for name in there:
            if name.startswith(OPTIMIZER):
                parameter_name, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
                keys.setdefault(parameter_name, []).append(key)
        ranges: list[Range] = []
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for _, parameter, index in self.sharded.parameters:
            shard = self.sharded.shards.get(index)
            name = self.ownership.name(parameter)
            if shard is None or (name not in keys and name not in scalars):
                continue
            entries: dict[str, Any] = {}
            for key in keys.get(name, ()):
                flat = torch.empty(shard.master.numel(), dtype=shard.master.dtype, device=shard.master.device)
                entries[key] = flat.view(shard.master.shape)
                start = self.ownership.start(parameter) + shard.start
                ranges.append(Range(f"{OPTIMIZER}{name}.{key}", self.ownership.size(parameter), start, flat))
            for key, item in scalars.get(name, {}).items():
                entries[key] = item.clone() if isinstance(item, Tensor) else item
            state[shard.master] = entries
        return ranges, state


def is_range(item: Any, master: nn.Parameter) -> bool:
    """Whether an entry of the optimizer's state has a value for each element, and is no counter."""
    return isinstance(item, Tensor) and item.ndim > 0 and item.shape == master.shape


def _replicated(group: Any) -> bool:
    """Whether each process of its axis holds all of a group."""
    return isinstance(group, Bucket) and not group.sharded and group.axis.size > 1
