"""What the hosts of a group exchange over a process group, without memory that they share."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from olmoe_lightning.kernels.memory.symmetric import PeerError


def gather_objects(group: dist.ProcessGroup, own: Any) -> list[Any]:
    """One object of every process, by rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def gather_numbers(group: dist.ProcessGroup, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Numbers of every process, equally many, by rank; a barrier also without any.

    Raises:
        PeerError: a process did not come in time, or has ended.
    """
    count, size = len(numbers), dist.get_world_size(group)
    own = torch.tensor([*numbers, 0])
    found = array.array("q", bytes(8 * (count + 1) * size))  # read as an array: no tensor's value is looked at
    try:
        dist.all_gather(list(torch.frombuffer(found, dtype=torch.int64).chunk(size)), own, group=group)
    except RuntimeError as error:
        raise PeerError(f"rank {dist.get_rank(group)} of {size} waited in vain for another: {error}") from error
    return [tuple(found[begin : begin + count]) for begin in range(0, len(found), count + 1)]
