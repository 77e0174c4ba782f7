"""From the name of a communication plugin to the plugin, ours or another package's, or to the reason why not."""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import EntryPoint, entry_points

import torch

from olmoe_lightning.errors import UserError, UserTypeError
from olmoe_lightning.plugins.comm.base import CommPlugin

ENTRY_POINT_GROUP = "olmoe_lightning.comm"
"""Where other packages name theirs: ``[project.entry-points."olmoe_lightning.comm"]``, ``name = "module:Class"``."""

_BUILT_IN = {
    "local": "olmoe_lightning.plugins.comm.local:LocalComm",
    "all_to_all": "olmoe_lightning.plugins.comm.all_to_all:AllToAllComm",
    "rowwise": "olmoe_lightning.plugins.comm.rowwise:RowwiseComm",
}
_NOT_YET = ("deepep",)


def _registered() -> dict[str, EntryPoint]:
    """Plugins of other packages; nothing is imported. Our own names cannot be taken."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in _BUILT_IN}


def known_names() -> list[str]:
    """What ``comm`` may be, besides an instance."""
    return ["auto", *_BUILT_IN, *sorted(_registered())]


def choose(axis_size: int, device: torch.device) -> tuple[str, str]:
    """What ``auto`` takes, and why.

    Returns:
        The name and a reason.
    """
    if axis_size == 1:
        return "local", "all experts are in one process"
    network = {"cpu": "gloo", "cuda": "NCCL"}.get(device.type, device.type)
    return "all_to_all", f"the experts are shared by {axis_size} processes, which speak over {network}"


def describe_choice(comm: str | CommPlugin, axis_size: int, device: torch.device) -> str:
    """One line for the log: which plugin is used and who chose it."""
    if comm == "auto":
        return "comm 'auto' chose {!r}: {}".format(*choose(axis_size, device))
    return f"comm {comm if isinstance(comm, str) else comm.name!r}, as asked for"


def make_comm(comm: str | CommPlugin, axis_size: int, device: torch.device) -> CommPlugin:
    """The plugin of this name, not set up yet. Never another one than asked for.

    Args:
        comm: ``"auto"``, a name of :func:`known_names`, or an instance, which is returned.
        axis_size: processes that share the experts.
        device: where the rows will be.

    Raises:
        UserError: the name is unknown, or its plugin cannot be used here; the message has the reason and what to take.
        UserTypeError: neither a name nor an instance.
    """
    if isinstance(comm, type) and issubclass(comm, CommPlugin):
        raise UserTypeError(f"comm is the class {comm.__name__}; give an instance, {comm.__name__}(...)")
    if not isinstance(comm, (str, CommPlugin)):
        raise UserTypeError(f"comm must be a name ({', '.join(known_names())}) or a CommPlugin, got {comm!r}")
    if isinstance(comm, CommPlugin):
        plugin = comm
    else:
        name = choose(axis_size, device)[0] if comm == "auto" else comm
        plugin = _load(name, axis_size, device)()
    if reason := plugin.unavailable(axis_size, device):
        raise UserError(f"comm {plugin.name!r} cannot be used here: {reason}; {_advice(axis_size, device)}")
    return plugin


def _load(name: str, axis_size: int, device: torch.device) -> type[CommPlugin]:
    registered = _registered()
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in registered:
        return _load_registered(registered[name], axis_size, device)
    if name in _NOT_YET:
        raise UserError(f"comm {name!r} is not part of this version yet; {_advice(axis_size, device)}")
    names = known_names()
    closest = difflib.get_close_matches(name, names, n=len(names), cutoff=0.0)
    names = [*closest, *(other for other in names if other not in closest)]
    raise UserError(
        f"unknown comm {name!r}; known are {', '.join(map(repr, names))}. Other packages register theirs in the "
        f"entry-point group {ENTRY_POINT_GROUP!r}"
    )


def _load_registered(point: EntryPoint, axis_size: int, device: torch.device) -> type[CommPlugin]:
    owner = f"{point.value} of {point.dist.name} {point.dist.version}" if point.dist else point.value
    try:
        loaded = point.load()
    except Exception as error:  # a third party's module may raise anything when it is imported
        raise UserError(
            f"comm {point.name!r} ({owner}) could not be imported: {type(error).__name__}: {error}; "
            f"{_advice(axis_size, device)}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, CommPlugin)):
        raise UserError(f"comm {point.name!r} ({owner}) is not a subclass of CommPlugin but {loaded!r}")
    return loaded


def _advice(axis_size: int, device: torch.device) -> str:
    name, reason = choose(axis_size, device)
    return f"take {name!r} ({reason})"
