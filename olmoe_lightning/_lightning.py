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
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher

__all__ = [
    "NoOptimizer",
    "ScriptLauncher",
    "batches_processed",
    "default_backend",
    "distributed_is_initialized",
    "init_process_group",
    "layer_sync_of",
    "optimizers_to_device",
    "reset_seed",
    "trainer_of",
]


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The trainer that a module is attached to; ``module.trainer`` raises where there is none."""
    return None if module is None else module._trainer


def layer_sync_of(strategy: ParallelStrategy) -> LayerSync | None:
    """What turns a module's batch norms into synchronised ones, if the trainer was asked for it."""
    return strategy._layer_sync


def batches_processed(trainer: Trainer) -> int:
    """Training batches of the whole run, also before a resume."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    assert isinstance(total, _ProcessedTracker)
    return total.processed
