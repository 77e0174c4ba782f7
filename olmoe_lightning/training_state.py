"""Weights, masters and optimizer state of one process as ranges of global tensors, whatever the mesh.

A tensor's global name is that of the module, with global layer numbers; the experts of all ranks are one tensor along
its first dimension. Flattened, what a process holds of it is one range: buckets, shards and stages do not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from olmoe_lightning.checkpoint.sharded import Fragment
from olmoe_lightning.parallel.buffers import Bucket
from olmoe_lightning.parallel.mesh import Axis, Mesh
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer

MODEL = "state_dict."
OPTIMIZER = "optimizer."


class TrainingState:
    """One process' view of it.

    Args:
        module: with the layers and experts of this process.
        mesh: the processes.
        sharded: its optimizer, if it trains.
        is_expert: whether a parameter is a shard of the experts.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        sharded: ShardedOptimizer | None,
        is_expert: Callable[[nn.Parameter], bool],
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.sharded = sharded
        self.is_expert = is_expert
        self.tensors: dict[str, Tensor] = {}
        """Parameters and kept buffers of this process by name; tied ones under their first name."""
        self.aliases: dict[str, str] = {}
        """Second names of tied tensors."""
        seen: dict[int, str] = {}
        self.other: dict[str, Any] = {}
        """What a module keeps in its ``state_dict`` that is no tensor."""
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                self.other[name] = value
            elif id(value) in seen:
                self.aliases[name] = seen[id(value)]
            else:
                seen[id(value)] = name
                self.tensors[name] = value
        self._names = {id(value): name for name, value in self.tensors.items()}

    def shapes(self) -> dict[str, list[int]]:
        """Global shape of each tensor of this process."""
        return {name: self._global_shape(value) for name, value in self.tensors.items()}

    # ---------------------------------------------------------------------------------------------- writing

    def model_to_write(self) -> list[Fragment]:
        """What this process writes of the model: fp32 masters of what is trained, the rest as it is."""
        found = self._pieces_to_write(MODEL, lambda master: master.detach())
        trained = self._trained()
        for name, value in self.tensors.items():
            if id(value) not in trained:
                whole = _flat(value.detach())
                found.append(self._own_part(MODEL + name, value, whole, 0, self._replicas(value)))
        return found

    def optimizer_to_write(self) -> tuple[list[Fragment], dict[str, dict[str, Any]]]:
        """What this process writes of the optimizer's state: ranges, and scalars by parameter and key."""
        fragments: list[Fragment] = []
        scalars: dict[str, dict[str, Any]] = {}
        if self.sharded is None:
            return fragments, scalars
        state = self.sharded.optimizer.state
        keys: dict[str, None] = {}
        for name, _, index in self.sharded.parameters:
            piece = self.sharded.pieces.get(index)
            for key, item in state.get(piece.master, {}).items() if piece is not None else ():
                assert piece is not None
                if is_range(item, piece.master):
                    keys[key] = None
                else:
                    scalars.setdefault(name, {})[key] = item.detach().cpu() if isinstance(item, Tensor) else item
        for key in keys:

            def entry(master: nn.Parameter, key: str = key) -> Tensor | None:
                item = state.get(master, {}).get(key)
                return item if item is not None and is_range(item, master) else None

            fragments += self._pieces_to_write(OPTIMIZER, entry, f".{key}")
        return fragments, scalars

    def _pieces_to_write(
        self, prefix: str, values: Callable[[nn.Parameter], Tensor | None], suffix: str = ""
    ) -> list[Fragment]:
        found: list[Fragment] = []
        if self.sharded is None:
            return found
        whole = {piece.number for group in self.sharded.groups if _replicated(group) for piece in group.pieces}
        for _, parameter, index in self.sharded.parameters:
            piece = self.sharded.pieces.get(index)
            value = values(piece.master) if piece is not None else None
            if piece is None or value is None:
                continue
            axis = self.sharded.axis_of[parameter] if index in whole else None
            name = prefix + self._names[id(parameter)] + suffix
            found.append(self._own_part(name, parameter, _flat(value), piece.start, axis))
        return found

    def _own_part(self, name: str, tensor: Tensor, flat: Tensor, start: int, axis: Axis | None) -> Fragment:
        """A range of ``tensor``, of which each of the processes that all hold it writes an equal part."""
        if axis is not None:
            begin, end = (flat.numel() * rank // axis.size for rank in (axis.rank, axis.rank + 1))
            flat, start = flat[begin:end], start + begin
        return Fragment(name, self._size(tensor), self._first(tensor) + start, flat)

    # ---------------------------------------------------------------------------------------------- reading

    def model_to_read(self) -> tuple[list[Fragment], Callable[[], None]]:
        """Where values of the model are read to, and what is to be called when they are there."""
        found: list[Fragment] = []
        copies: list[tuple[Tensor, Tensor]] = []
        trained = self._trained()
        if self.sharded is not None:
            for _, parameter, index in self.sharded.parameters:
                piece = self.sharded.pieces.get(index)
                if piece is not None:
                    name = MODEL + self._names[id(parameter)]
                    start = self._first(parameter) + piece.start
                    found.append(Fragment(name, self._size(parameter), start, _flat(piece.master.detach())))
        for name, value in self.tensors.items():
            if id(value) in trained:
                continue
            flat = value.detach()
            if not flat.is_contiguous():
                flat = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                copies.append((value.detach(), flat))
            found.append(Fragment(MODEL + name, self._size(value), self._first(value), flat.view(-1)))

        def finish() -> None:
            for target, source in copies:
                target.copy_(source)
            if self.sharded is not None:
                self.sharded.start_gather()  # the compute weights, from everyone's masters
                self.sharded.finish_gather()

        return found, finish

    def optimizer_to_read(
        self, there: Mapping[str, Any], scalars: Mapping[str, Mapping[str, Any]]
    ) -> tuple[list[Fragment], dict[nn.Parameter, dict[str, Any]]]:
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
        fragments: list[Fragment] = []
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for _, parameter, index in self.sharded.parameters:
            piece = self.sharded.pieces.get(index)
            name = self._names[id(parameter)]
            if piece is None or (name not in keys and name not in scalars):
                continue
            entries: dict[str, Any] = {}
            for key in keys.get(name, ()):
                entries[key] = torch.zeros_like(piece.master, requires_grad=False)
                start = self._first(parameter) + piece.start
                full = f"{OPTIMIZER}{name}.{key}"
                fragments.append(Fragment(full, self._size(parameter), start, entries[key].view(-1)))
            for key, item in scalars.get(name, {}).items():
                entries[key] = item.clone() if isinstance(item, Tensor) else item
            state[piece.master] = entries
        return fragments, state

    # ---------------------------------------------------------------------------------------------- places

    def _trained(self) -> set[int]:
        return {id(parameter) for _, parameter, _ in self.sharded.parameters} if self.sharded is not None else set()

    def _spread(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and self.is_expert(tensor)

    def _replicas(self, tensor: Tensor) -> Axis:
        return self.mesh.expert_replica if self._spread(tensor) else self.mesh.data

    def _global_shape(self, tensor: Tensor) -> list[int]:
        shape = list(tensor.shape)
        if self._spread(tensor):
            shape[0] *= self.mesh.expert.size
        return shape

    def _size(self, tensor: Tensor) -> int:
        return math.prod(self._global_shape(tensor))

    def _first(self, tensor: Tensor) -> int:
        return self.mesh.expert.rank * tensor.numel() if self._spread(tensor) else 0


def is_range(item: Any, master: nn.Parameter) -> bool:
    """Whether an entry of the optimizer's state has a value for each element, and is no counter."""
    return isinstance(item, Tensor) and item.ndim > 0 and item.shape == master.shape


def _replicated(group: Any) -> bool:
    """Whether each process of its axis holds all of a group."""
    return isinstance(group, Bucket) and not group.sharded and group.axis.size > 1


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)
