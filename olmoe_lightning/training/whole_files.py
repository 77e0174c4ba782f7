"""Checkpoints that are files: each appears under its name as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from olmoe_lightning.checkpoint.publish import remove, whole_file


class WholeFiles(TorchCheckpointIO):
    """Lightning's files, published as directories are; where they do not go to a local path, as Lightning does it."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with whole_file(Path(path)) as temporary:
            torch.save(checkpoint, temporary)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        if _is_remote(path):
            super().remove_checkpoint(path)
        else:
            remove(Path(path))


def _is_remote(path: Any) -> bool:
    return "://" in str(path)
