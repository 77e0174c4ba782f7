"""Steps of a save that processes take together: gather, let rank 0 decide, publish; and what must be finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from olmoe_lightning.checkpoint.manifest import write_json
from olmoe_lightning.checkpoint.meta import KEY, META, MODEL
from olmoe_lightning.checkpoint.publish import publish
from olmoe_lightning.checkpoint.ranges import OPTIMIZER
from olmoe_lightning.checkpoint.sharded import Range, SafeReader

MANIFEST = "manifest.json"
"""Of a checkpoint, beside its tensors."""
_PIECE = 2**20


class SaveError(RuntimeError):
    """A checkpoint was not written; what was there before is untouched. The same on all processes."""


def publish_parts(temporary: Path, target: Path, everyone: list[dict[str, Any]], rest: dict[str, Any]) -> None:
    """On rank 0: the parts that are not tensors, and then all of it under its name."""
    entries = SafeReader(temporary).read_metadata()
    lost = sorted(
        {info.relative_path for info in entries.storage_data.values()} - {p.name for p in temporary.iterdir()}
    )
    if lost:
        raise SaveError(
            f"no checkpoint was written to {target}: {', '.join(lost[:3])} of other processes cannot be seen from rank "
            "0; all nodes must share the folder"
        )
    checkpoint = dict(rest["checkpoint"])
    joined: dict[str, Any] = {name: {} for name in ("shapes", "aliases", "other", "scalars", "group_of")}
    groups: dict[str, Any] = {}
    for each in everyone:
        for name, entry in joined.items():
            entry.update(each[name])
        groups = each["param_groups"] | groups
    joined["random"] = [each["random"] for each in everyone]
    joined["param_groups"] = list(groups.values())
    joined["tensors"] = sorted(entries.state_dict_metadata)
    checkpoint[KEY] = checkpoint[KEY] | joined
    torch.save(checkpoint, temporary / META)
    write_json(temporary / MANIFEST, rest["manifest"])
    publish(temporary, target)


def share(target: Any, action: Callable[[], Any], rank: int, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 found by ``action``, on all processes; its failure, of any kind, is everyone's."""
    outcome: list[Any] = [None, None]
    cause: Exception | None = None
    if rank == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # torch.save raises all kinds, and the others must not be left waiting
            cause = error
            outcome[1] = str(error)
            if not isinstance(error, SaveError):
                kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
                outcome[1] = f"no checkpoint was written to {target}: {kind}{error}"
    if group is not None:
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise SaveError(outcome[1]) from cause
    return outcome[0]


def gather(own: dict[str, Any], rank: int, size: int, group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """What each process has, on rank 0; empty elsewhere."""
    if group is None:
        return [own]
    found: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(own, found, dst=0, group=group)
    return found or []


def is_optimizer_s(part: Range, own: dict[str, Any]) -> bool:
    """Whether the optimizer, and nothing else, changes it: what is trained, and its state. A buffer may be anything."""
    return part.name.startswith(OPTIMIZER) or part.name.removeprefix(MODEL) in own["trained"]


def is_finite(values: Tensor) -> bool:
    """Whether all are; what is not finite makes the sum so, which is read once and takes no memory."""
    if not values.is_floating_point() or bool(values.sum().isfinite()):
        return True
    return all(bool(part.isfinite().all()) for part in values.split(_PIECE))  # a sum can also overflow
