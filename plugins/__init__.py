"""What people add to: ``comm`` moves tokens to their experts and back, ``precision`` chooses the number formats."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olmoe_lightning.plugins.comm import AllToAllComm, CommPlugin, CommSpec, LocalComm, RowwiseComm
    from olmoe_lightning.plugins.precision.bf16 import BF16Precision

__all__ = ["AllToAllComm", "BF16Precision", "CommPlugin", "CommSpec", "LocalComm", "RowwiseComm"]

_HOME = {
    "AllToAllComm": "comm.all_to_all",
    "CommPlugin": "comm.base",
    "CommSpec": "comm.base",
    "LocalComm": "comm.local",
    "RowwiseComm": "comm.rowwise",
    "BF16Precision": "precision.bf16",
}


def __getattr__(name: str) -> Any:
    # Names are imported on first use (PEP 562): a plugin that is not used need not be importable.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
