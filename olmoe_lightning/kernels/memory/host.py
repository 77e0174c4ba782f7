"""What the hosts of a group exchange over a process group, without memory that they share."""

from __future__ import annotations

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
    own = torch.tensor([*numbers, 0])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(parts, own, group=group)
    except RuntimeError as error:
        here = f"rank {dist.get_rank(group)} of {len(parts)}"
        raise PeerError(f"{here} waited in vain for another: {error}") from error
    return [tuple(part[:-1].tolist()) for part in parts]
