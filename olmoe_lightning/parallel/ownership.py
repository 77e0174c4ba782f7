"""Who owns what: the one place that knows which processes hold a tensor of a module, and under which name it is saved.

A tensor has one global name, that of the module (with global layer numbers), whatever the mesh. It is held

- by one stage of the pipeline; what several hold is as the first one has it, and nothing that any of them trains;
- there, by every data rank, or, if it is a weight of the experts, in parts along its first dimension by the ranks of
  the ``expert`` axis, each part by all ``expert_replica`` ranks.

The processes that hold the same values are its *replicas*. The first of them is the source of the values when a run
starts; gradients are summed over them; each of them updates and writes an equal share. Placement, reduction, gathering,
saving, loading and refusals ask here.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.layout import Views, is_dense, kind
from olmoe_lightning.parallel.mesh import Axis, Mesh


class Ownership:
    """Of the tensors of a module, as they are now.

    Args:
        module: with the layers and experts of this process.
        mesh: the processes.
        experts: the parameters and buffers of which each rank of the ``expert`` axis holds its own part, along the
            first dimension.
        trained: the parameters that the optimizer changes.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        experts: Collection[Tensor],
        trained: Iterable[nn.Parameter] = (),
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.parameters = {parameter: name for name, parameter in module.named_parameters()}
        """Their names, in the order of the module; tied ones under their first name."""
        self._experts = {id(parameter) for parameter in experts}
        self._trained = {id(parameter) for parameter in trained}

    # ---------------------------------------------------------------------------------------------- one tensor

    def is_expert(self, tensor: Tensor) -> bool:
        """Whether other ranks of the ``expert`` axis hold other parts of it."""
        return id(tensor) in self._experts

    def is_trained(self, tensor: Tensor) -> bool:
        """Whether the optimizer, and nothing else, changes it."""
        return id(tensor) in self._trained

    def replicas(self, tensor: Tensor) -> Axis:
        """The processes that hold the same values; the first is their source."""
        return self.mesh.expert_replica if self.is_expert(tensor) else self.mesh.data

    def shape(self, tensor: Tensor) -> list[int]:
        """Of the global tensor."""
        shape = list(tensor.shape)
        if self.is_expert(tensor) and self.mesh.expert.size > 1:
            # A number of each rank is a row of them; other ranks than these cannot share it out.
            return [self.mesh.expert.size * (shape[0] if shape else 1), *shape[1:]]
        return shape

    def size(self, tensor: Tensor) -> int:
        """Elements of the global tensor."""
        return math.prod(self.shape(tensor))

    def start(self, tensor: Tensor) -> int:
        """Where the part of this process begins in the flattened global tensor."""
        return self.mesh.expert.rank * tensor.numel() if self.is_expert(tensor) else 0

    # ---------------------------------------------------------------------------------------------- what is saved

    class _Saved(NamedTuple):
        tensors: dict[str, Tensor]
        aliases: dict[str, str]
        other: dict[str, Any]
        names: dict[int, str]

    @functools.cached_property
    def _saved(self) -> _Saved:
        saved = self._Saved({}, {}, {}, {})
        held = {id(value) for value in (*self.parameters, *self.module.buffers()) if is_dense(value)}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if id(value) not in held:
                saved.other[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
            elif id(value) in saved.names:
                saved.aliases[name] = saved.names[id(value)]
            elif value.numel():
                saved.names[id(value)] = name
                saved.tensors[name] = value
        for parameter, name in self.parameters.items():
            if self.is_trained(parameter) and id(parameter) not in saved.names:
                # A module may leave it out of its state; its moments need a name all the same.
                saved.names[id(parameter)] = name
                if parameter.numel():
                    saved.tensors[name] = parameter
        return saved

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and kept buffers of this process under the names by which they are saved."""
        return self._saved.tensors

    @property
    def aliases(self) -> dict[str, str]:
        """Second names of tied tensors, and the first ones."""
        return self._saved.aliases

    @property
    def other(self) -> dict[str, Any]:
        """What is no range of elements: extra state, values from hooks, tensors that are sparse or quantised."""
        return self._saved.other

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Global shape of each tensor of this process, by name."""
        return {name: self.shape(value) for name, value in self.tensors.items()}

    def of_experts(self, name: str) -> bool:
        """Whether a name of the ``state_dict`` is of a module that itself holds weights of experts."""
        part = dict(self.module.named_modules()).get(name.rpartition(".")[0])
        return part is not None and any(self.is_expert(weight) for weight in part.parameters(recurse=False))

    def name(self, tensor: Tensor) -> str:
        """The name by which a tensor is saved."""
        return self._saved.names[id(tensor)]

    # ---------------------------------------------------------------------------------------------- all processes

    def equalise(self, device: torch.device) -> None:
        """Every parameter and buffer gets the values of its source; collective.

        Args:
            device: of this process.

        Raises:
            UserError: processes that should hold the same tensors have others.
        """
        if self.mesh.world.size == 1:
            return
        self._refuse_other_replicas()
        for parameter in self.parameters:
            self.replicas(parameter).broadcast(parameter.data)
        self.equalise_buffers(device)
        self._equalise_stages({name: parameter.data for parameter, name in self.parameters.items()}, device)

    def equalise_buffers(self, device: torch.device) -> None:
        """Buffers (running statistics) get the values of the first of their replicas, as under DDP; collective.

        Args:
            device: of this process.
        """
        if self.mesh.world.size == 1:
            return
        buffers = {name: each for name, each in self.module.named_buffers() if each.numel() and not each.is_meta}
        for buffer in buffers.values():
            self.replicas(buffer).broadcast(buffer.data)
        kept = {name: buffer.data for name, buffer in buffers.items() if id(buffer) in self._saved.names}
        self._equalise_stages(kept, device)

    def _equalise_stages(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """What several stages of a pipeline hold under one name is saved as the first one has it, and so it is."""
        axis = self.mesh.pipeline
        if axis.size == 1:
            return
        everyone = axis.all_gather_objects({name: (list(each.shape), each.dtype) for name, each in tensors.items()})
        held: dict[str, list[int]] = {}
        for stage, found in enumerate(everyone):
            for name in found:
                held.setdefault(name, []).append(stage)
        for name, (source, *others) in held.items():
            shape, dtype = everyone[source][name]
            for other in others:
                if everyone[other][name] != (shape, dtype):
                    raise UserError(
                        f"{name} is {dtype} {shape} on pipeline rank {source} and {everyone[other][name][1]} "
                        f"{everyone[other][name][0]} on rank {other}; a name is one tensor: give each its own"
                    )
            if others:
                own = tensors.get(name)
                axis.broadcast(torch.empty(shape, dtype=dtype, device=device) if own is None else own, source)

    def _refuse_other_replicas(self) -> None:
        """Sends and receives of other sizes end a process without a word."""
        tensors = {**{name: each for each, name in self.parameters.items()}, **dict(self.module.named_buffers())}
        own = [(name, list(each.shape), str(each.dtype)) for name, each in tensors.items()]
        if len(set(self.mesh.data.all_gather_objects(zlib.crc32(repr(own).encode())))) == 1:
            return
        first, *others = self.mesh.data.all_gather_objects(own)
        rank, other = next((rank, each) for rank, each in enumerate(others, start=1) if each != first)
        alone = [each for each in first if each not in other] or [each for each in other if each not in first]
        name, shape, dtype = (alone or first)[0]
        raise UserError(
            f"data rank {rank} has other parameters and buffers than rank 0, or has them in another order, for example "
            f"{name} of {dtype} {shape}; build the same module on all processes, whatever their data"
        )

    def views_of_trained(self) -> Views:
        """What looks at the memory of trained parameters, which several processes move into buckets.

        Raises:
            UserError: several of them have elements in common.
        """
        held: dict[Tensor, str] = {}
        held.update((parameter, name) for parameter, name in self.parameters.items())
        held.update((buffer, name) for name, buffer in self.module.named_buffers())
        several = self.mesh.world.size > 1
        moved = {tensor: name for tensor, name in held.items() if several and self.is_trained(tensor)}
        return Views(moved, {tensor: name for tensor, name in held.items() if tensor not in moved})

    def refuse_layouts(self) -> None:
        """Stop at tensors that are more than their elements, where they can neither be exchanged nor read again.

        Raises:
            UserError: the name of one.
        """
        kept = self.module.state_dict(keep_vars=True).keys()
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if is_dense(tensor):
                continue
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                why = "cannot be trained on shards"
            elif self.mesh.world.size > 1:
                why = f"cannot be exchanged by {self.mesh.world.size} processes"
            elif tensor.is_nested and name in kept:
                why = "cannot be loaded from a checkpoint"
            else:
                continue
            raise UserError(
                f"{name} is a {kind(tensor)} tensor, which {why}; keep what it is made of (its values and indices, or "
                "integers, scales and zero points) in buffers of their own, or make it a plain attribute"
            )

    def refuse_two_owners(self) -> None:
        """Stop if a stage of the pipeline trains what another one has too; collective, all processes refuse together.

        Raises:
            UserError: the names.
        """
        own = [name for parameter, name in self.parameters.items() if self.is_trained(parameter)]
        held = [*self.parameters.values(), *(name for name, _ in self.module.named_buffers())]
        everyone = self.mesh.pipeline.all_gather_objects((own, held))
        counts = Counter(name for trained, _ in everyone for name in trained)
        holders = Counter(name for _, held in everyone for name in set(held))
        twice = [name for name, count in counts.items() if count > 1]
        copied = [name for name, count in counts.items() if count == 1 and holders[name] > 1]
        if copied and not twice:
            raise UserError(
                f"{len(copied)} parameters are trained by one stage of the pipeline and held by others too, whose "
                f"copies would stay as they are, for example {copied[0]}; in configure_model build only the layers "
                "that trainer.strategy.stage_map.layers_of(rank) names, and share nothing between stages"
            )
        if twice:
            raise UserError(
                f"{len(twice)} parameters are trained by several stages of the pipeline, each its own copy, for "
                f"example {twice[0]}; in configure_model build only the layers that "
                "trainer.strategy.stage_map.layers_of(rank) names, and share nothing between stages"
            )

    def describe(self, updated: Mapping[nn.Parameter, int] | None = None) -> str:
        """Two tables for people: the rules for each kind of tensor, and who holds which; collective.

        Args:
            updated: elements of each trained parameter that the optimizer of this process updates.
        """
        rows = [
            _Held(
                name,
                self._kind(tensor),
                tuple(self.shape(tensor)),
                self.mesh.rank,
                (self.start(tensor), self.start(tensor) + tensor.numel()),
                (updated or {}).get(tensor, 0) if isinstance(tensor, nn.Parameter) else 0,
            )
            for name, tensor in self.tensors.items()
        ]
        return _table(self.mesh, [row for rank in self.mesh.world.all_gather_objects(rows) for row in rank])

    def _kind(self, tensor: Tensor) -> str:
        if not isinstance(tensor, nn.Parameter):
            return "expert buffer" if self.is_expert(tensor) else "buffer"
        if not self.is_trained(tensor):
            return "frozen"
        return "expert" if self.is_expert(tensor) else "dense"


class _Held(NamedTuple):
    """What a process has of a tensor."""

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int
    span: tuple[int, int]
    updated: int


_RULES = (
    ("kind", "replicas", "changed by", "when the others see it", "saved as"),
    ("dense", "all data ranks", "optimizer, each rank its share", "before the layer's next forward", "state_dict.NAME"),
    (
        "expert",
        "expert_replica",
        "optimizer, each rank its share",
        "before the layer's next forward",
        "state_dict.NAME",
    ),
    ("frozen", "as dense or expert", "no one", "when the run starts", "state_dict.NAME"),
    (
        "buffer",
        "all data ranks",
        "forward; the first rank counts",
        "when evaluation or a save starts",
        "state_dict.NAME",
    ),
    (
        "expert buffer",
        "expert_replica",
        "forward; the first rank counts",
        "when evaluation or a save starts",
        "state_dict.NAME",
    ),
    ("gradient", "as its parameter", "backward, summed over replicas", "at the end of the step", "-"),
    ("moments", "one rank each share", "optimizer", "never", "optimizer.NAME.KEY"),
    ("random state", "one rank each", "whatever draws numbers", "never", "moe_checkpoint random[RANK]"),
    ("loader state", "one data rank each", "the data loader", "never", "moe_checkpoint loaders[RANK]"),
    ("extra state", "one rank each", "its module", "never", "moe_checkpoint own_other[RANK]"),
)


def _table(mesh: Mesh, rows: list[_Held]) -> str:
    lines = [("tensor", "kind", "shape", "held by", "updated by")]
    by_name: dict[str, list[_Held]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    for name, held in by_name.items():
        spans: dict[tuple[int, int], list[int]] = {}
        for row in held:
            spans.setdefault(row.span, []).append(row.rank)
        size = math.prod(held[0].shape)
        first = held[0].shape[0] if held[0].shape else 1
        parts = [
            f"rank{'s' if len(ranks) > 1 else ''} {_ranks(ranks)}"
            + ("" if span == (0, size) else f": [{span[0] * first // size}:{span[1] * first // size}]")
            for span, ranks in spans.items()
        ]
        shares = [f"{row.rank}: {row.updated}" for row in held if row.updated]
        lines.append((name, held[0].kind, str(list(held[0].shape)), "; ".join(parts), ", ".join(shares) or "-"))
    shape = mesh.shape
    title = (
        f"{shape.world} processes: pipeline {shape.pipeline} x expert_replica {shape.expert_replica} x "
        f"expert {shape.expert}"
    )
    return "\n".join([title, "", *_aligned(_RULES), "", *_aligned(lines)])


def _ranks(ranks: list[int]) -> str:
    """``0-3`` or ``0, 2``."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
