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

from olmoe_lightning.checkpoint.meta import MODEL
from olmoe_lightning.checkpoint.sharded import Range
from olmoe_lightning.parallel.buffers import Bucket, Piece
from olmoe_lightning.parallel.mesh import Axis, Mesh
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer

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
        self.other: dict[str, Any] = {}
        """What a module makes for its ``state_dict`` and takes back from it: extra state, values from hooks."""
        self._names: dict[int, str] = {}
        held = {id(value) for value in (*module.parameters(), *module.buffers())}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) not in held:
                self.other[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
            elif id(value) in self._names:
                self.aliases[name] = self._names[id(value)]
            elif value.numel():
                self._names[id(value)] = name
                self.tensors[name] = value
        for name, parameter, _ in sharded.parameters if sharded is not None else ():
            if id(parameter) not in self._names:  # a module may leave it out of its state; its moments need a name
                self._names[id(parameter)] = name
                if parameter.numel():
                    self.tensors[name] = parameter

    def shapes(self) -> dict[str, list[int]]:
        """Global shape of each tensor of this process."""
        return {name: self._global_shape(value) for name, value in self.tensors.items()}

    # ---------------------------------------------------------------------------------------------- writing

    def model_to_write(self) -> list[Range]:
        """What this process writes of the model: fp32 masters of what is trained, the rest as it is."""
        # After the run the parameters are on their own: the masters' values, or what was put there since.
        over = self.sharded is not None and self.sharded.closed
        found = self._pieces_to_write(MODEL, lambda piece, parameter: _own_values(piece, parameter, over))
        trained = self._trained()
        for name, value in self.tensors.items():
            if id(value) not in trained:
                whole = _flat(value.detach())
                found.append(self._own_part(MODEL + name, value, whole, 0, self._replicas(value)))
        return found

    def trained_names(self) -> set[str]:
        """Of the tensors that the optimizer changes."""
        return {self._names[number] for number in self._trained()}

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
            name = self._names[id(parameter)]
            piece = self.sharded.pieces.get(index)
            for key, item in state.get(piece.master, {}).items() if piece is not None else ():
                assert piece is not None
                if is_range(item, piece.master):
                    keys[key] = None
                    continue
                if isinstance(item, Tensor) and item.ndim and self._spread(parameter) and self.mesh.expert.size > 1:
                    problems.append(f"{key} of {name} has the shape {list(item.shape)}, not that of the parameter")
                scalars.setdefault(name, {})[key] = kept(item)
        for key in keys:

            def entry(piece: Piece, parameter: nn.Parameter, key: str = key) -> Tensor | None:
                item = state.get(piece.master, {}).get(key)
                return _flat(item) if item is not None and is_range(item, piece.master) else None

            ranges += self._pieces_to_write(OPTIMIZER, entry, f".{key}")
        return ranges, scalars, problems

    def _pieces_to_write(
        self, prefix: str, values: Callable[[Piece, nn.Parameter], Tensor | None], suffix: str = ""
    ) -> list[Range]:
        found: list[Range] = []
        if self.sharded is None:
            return found
        whole = {piece.number for group in self.sharded.groups if _replicated(group) for piece in group.pieces}
        for _, parameter, index in self.sharded.parameters:
            piece = self.sharded.pieces.get(index)
            value = values(piece, parameter) if piece is not None else None
            if piece is None or value is None:
                continue
            axis = self.sharded.axis_of[parameter] if index in whole else None
            name = prefix + self._names[id(parameter)] + suffix
            found.append(self._own_part(name, parameter, value, piece.start, axis))
        return found

    def _own_part(self, name: str, tensor: Tensor, flat: Tensor, start: int, axis: Axis | None) -> Range:
        """A range of ``tensor``, of which each of the processes that all hold it writes an equal part."""
        if axis is not None:
            begin, end = (flat.numel() * rank // axis.size for rank in (axis.rank, axis.rank + 1))
            flat, start = flat[begin:end], start + begin
        return Range(name, self._size(tensor), self._first(tensor) + start, flat)

    # ---------------------------------------------------------------------------------------------- reading

    def model_to_read(self) -> tuple[list[Range], Callable[[], None]]:
        """Where values of the model are read to, and what is to be called when they are there."""
        found: list[Range] = []
        copies: list[tuple[Tensor, Tensor]] = []
        trained = self._trained()

        def flat(value: Tensor) -> Tensor:
            """The values themselves, or a place from which they are copied in the end."""
            if value.is_contiguous():
                return value.detach().view(-1)
            copies.append((value.detach(), torch.empty(value.shape, dtype=value.dtype, device=value.device)))
            return copies[-1][1].view(-1)

        if self.sharded is not None:
            for _, parameter, index in self.sharded.parameters:
                piece = self.sharded.pieces.get(index)
                if piece is not None:
                    name = MODEL + self._names[id(parameter)]
                    start = self._first(parameter) + piece.start
                    found.append(Range(name, self._size(parameter), start, flat(piece.master)))
        for name, value in self.tensors.items():
            if id(value) not in trained:
                found.append(Range(MODEL + name, self._size(value), self._first(value), flat(value)))

        def finish() -> None:
            for target, source in copies:
                target.copy_(source)
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
            piece = self.sharded.pieces.get(index)
            name = self._names[id(parameter)]
            if piece is None or (name not in keys and name not in scalars):
                continue
            entries: dict[str, Any] = {}
            for key in keys.get(name, ()):
                flat = torch.empty(piece.master.numel(), dtype=piece.master.dtype, device=piece.master.device)
                entries[key] = flat.view(piece.master.shape)
                start = self._first(parameter) + piece.start
                ranges.append(Range(f"{OPTIMIZER}{name}.{key}", self._size(parameter), start, flat))
            for key, item in scalars.get(name, {}).items():
                entries[key] = item.clone() if isinstance(item, Tensor) else item
            state[piece.master] = entries
        return ranges, state

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


def _own_values(piece: Piece, parameter: nn.Parameter, over: bool) -> Tensor:
    """Of a piece, flat: those of the optimizer, or of the parameter when it is ``over``."""
    if over:
        return _flat(parameter.detach())[piece.start : piece.stop].to(torch.float32)
    return _flat(piece.master.detach())


def is_range(item: Any, master: nn.Parameter) -> bool:
    """Whether an entry of the optimizer's state has a value for each element, and is no counter."""
    return isinstance(item, Tensor) and item.ndim > 0 and item.shape == master.shape


def _replicated(group: Any) -> bool:
    """Whether each process of its axis holds all of a group."""
    return isinstance(group, Bucket) and not group.sharded and group.axis.size > 1


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)
