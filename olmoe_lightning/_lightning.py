"""Every name that Lightning does not promise to keep, in one place; a test fails when one of them moves."""

from __future__ import annotations

from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized as distributed_is_initialized,
)
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import (
    _init_dist_connection as init_process_group,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer as NoOptimizer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher

__all__ = [
    "NoOptimizer",
    "ScriptLauncher",
    "default_backend",
    "distributed_is_initialized",
    "init_process_group",
    "optimizers_to_device",
    "reset_seed",
    "trainer_of",
]


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The trainer of a module, if it is in one; ``module.trainer`` raises otherwise."""
    trainer: Trainer | None = getattr(module, "_trainer", None)
    return trainer
