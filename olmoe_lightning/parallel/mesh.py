"""Which process does what: a mesh of pipeline x expert_replica x expert, the last one innermost.

rank = (pipeline · R + expert_replica) · E + expert. Every expert-parallel rank is a data rank too, so dense parameters
are replicated over data = expert_replica x expert, and an expert over expert_replica alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from olmoe_lightning._torch import set_group_timeout
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.layout import distinct, flattened


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh; their product is the number of processes."""

    pipeline: int
    expert_replica: int
    expert: int

    @classmethod
    def of_world(cls, world_size: int, pipeline: int = 1, expert: int = 1) -> MeshShape:
        """The shape in which ``world_size`` processes hold stages of ``pipeline`` and shards of ``expert`` ranks.

        Raises:
            UserError: a size is not positive, or their product does not divide the number of processes.
        """
        for name, size in (("pipeline_parallel_size", pipeline), ("expert_parallel_size", expert)):
            if size < 1:
                raise UserError(f"{name} ({size}) must be at least 1")
        if world_size % (pipeline * expert):
            raise UserError(
                f"the number of processes ({world_size}) must be divisible by pipeline_parallel_size ({pipeline}) x "
                f"expert_parallel_size ({expert}) = {pipeline * expert}; change devices, num_nodes or these sizes"
            )
        return cls(pipeline, world_size // (pipeline * expert), expert)

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.expert_replica * self.expert

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.pipeline * self.data

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pipeline, expert_replica, expert) of a rank."""
        return rank // self.data, rank % self.data // self.expert, rank % self.expert


@dataclass(frozen=True)
class Axis:
    """The processes along one direction of the mesh, seen from one of them. One process alone needs no group."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in order."""
    rank: int
    """Own position among them."""
    group: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """Reduce in place over the axis, whatever the layout; nothing to do for one process."""
        return self._in_place(tensor, lambda dense: dist.all_reduce(dense, op=op, group=self.group))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite in place, whatever the layout, with the tensor of one process of the axis, by default the first."""

        def send(dense: Tensor) -> None:  # as bytes: backends know half of all types
            dist.broadcast(dense.view(torch.uint8), self.ranks[source], group=self.group)

        return self._in_place(tensor, send)

    def _in_place(self, tensor: Tensor, collective: Callable[[Tensor], Any]) -> Tensor:
        """Backends count elements from the first one on: they get each once, in one order on all processes."""
        if self.size > 1 and tensor.numel():
            part = distinct(tensor)
            dense = flattened(part)
            collective(dense)
            if dense.data_ptr() != part.data_ptr():
                part.copy_(dense.view(part.shape))
        return tensor

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value of one process of the axis, on all of them."""
        holder = [value]
        if self.size > 1:
            dist.broadcast_object_list(holder, src=self.ranks[source], group=self.group)
        return holder[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all processes in the order of the axis, on its first process; empty elsewhere."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=self.ranks[0], group=self.group)
        return found or []

    def all_gather_objects(self, value: Any) -> list[Any]:
        """The values of all processes in the order of the axis, on each of them."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value, group=self.group)
        return found


@dataclass(frozen=True)
class Mesh:
    """The mesh as one process sees it. It is made once and passed to whoever communicates."""

    shape: MeshShape
    rank: int
    world: Axis
    pipeline: Axis
    data: Axis
    expert_replica: Axis
    expert: Axis

    @classmethod
    def single(cls) -> Mesh:
        """One process, no process groups."""
        axes = (Axis(name, (0,), 0) for name in ("world", "pipeline", "data", "expert_replica", "expert"))
        return cls(MeshShape(1, 1, 1), 0, *axes)

    @classmethod
    def create(cls, shape: MeshShape, timeout: timedelta | None = None) -> Mesh:
        """Make the process groups; collective over all processes of the default group.

        A process that trains several times gets the same groups again: each keeps threads and sockets of its own, and
        none can be given back while another rank may still use it. Another timeout makes others: torch cannot change
        that of messages between two processes.

        Args:
            shape: of the mesh.
            timeout: of what the groups do, the default group too; by default what torch takes.

        Raises:
            UserError: the shape has another number of processes than the default group.
        """
        if shape.world != dist.get_world_size():
            raise UserError(f"the mesh {shape} has {shape.world} processes, but {dist.get_world_size()} are running")
        if timeout is not None and dist.group.WORLD is not None:
            set_group_timeout(dist.group.WORLD, timeout)
        made = _MADE.get((shape, timeout))
        if made is not None and made[0] is dist.group.WORLD:
            return made[1]
        rank = dist.get_rank()
        everyone = tuple(range(shape.world))

        def axis(name: str, part: Sequence[Sequence[int]]) -> Axis:
            own: Axis | None = None
            for ranks in part:  # every process makes every group, in the same order: new_group is collective
                group = None
                if len(ranks) > 1:
                    # Also where two axes are the same processes: gradients and tokens travel at the same time, and
                    # each kind must find only its own messages, whatever the other is doing on another rank.
                    group = dist.group.WORLD if name == "world" else dist.new_group(list(ranks), timeout)
                if rank in ranks:
                    own = Axis(name, tuple(ranks), ranks.index(rank), group)
            assert own is not None
            return own

        def lines(key: Any) -> list[list[int]]:
            found: dict[Any, list[int]] = {}
            for each in everyone:
                found.setdefault(key(*shape.coordinates(each)), []).append(each)
            return list(found.values())

        mesh = cls(
            shape,
            rank,
            axis("world", [everyone]),
            axis("pipeline", lines(lambda p, r, e: (r, e))),
            axis("data", lines(lambda p, r, e: p)),
            axis("expert_replica", lines(lambda p, r, e: (p, e))),
            axis("expert", lines(lambda p, r, e: (p, r))),
        )
        _MADE[shape, timeout] = (dist.group.WORLD, mesh)
        return mesh

    def __str__(self) -> str:
        """Where this process stands, for logs and errors."""
        pipeline, replica, expert = self.shape.coordinates(self.rank)
        sizes = self.shape
        return (
            f"rank {self.rank} of {sizes.world} (pipeline {pipeline}/{sizes.pipeline}, "
            f"expert_replica {replica}/{sizes.expert_replica}, expert {expert}/{sizes.expert})"
        )


_MADE: dict[tuple[MeshShape, timedelta | None], tuple[ProcessGroup | None, Mesh]] = {}
"""Meshes of this process by shape and timeout, with the default group that they were made in."""
