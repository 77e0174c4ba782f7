"""Every name that Lightning does not promise to keep, in one place; a test fails when one of them moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import torch_io
from lightning.fabric.utilities.cloud_io import _load
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
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.core import saving
from lightning.pytorch.core.optimizer import _MockOptimizer as NoOptimizer
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name
from lightning.pytorch.utilities.parsing import lightning_getattr

__all__ = [
    "REQUEUE_HANDLER",
    "SIGTERM_BROADCAST",
    "SIGTERM_HANDLER",
    "NoOptimizer",
    "ScriptLauncher",
    "WrappingCheckpointIO",
    "batches_processed",
    "begin_validation_anew",
    "default_backend",
    "distributed_is_initialized",
    "distributes_samplers",
    "init_process_group",
    "layer_sync_of",
    "learning_rate_of",
    "loader_states",
    "optimizers_to_device",
    "read_directories_by",
    "reset_seed",
    "set_loader_states",
    "set_received_sigterm",
    "signal_connector_of",
    "step_ends",
    "trainer_of",
    "validation_batches",
]

SIGTERM_HANDLER = "_sigterm_notifier_fn"
"""Of the trainer's signal connector: broadcasts, on the processes that got the signal."""
REQUEUE_HANDLER = "_slurm_sigusr_handler_fn"
"""Of the trainer's signal connector: saves a checkpoint."""
SIGTERM_BROADCAST = "_broadcast_sigterm_tensor"
"""Of the loop over training batches: called before each of them."""


def trainer_of(module: LightningModule | None) -> Trainer | None:
    """The trainer that a module is attached to; ``module.trainer`` raises where there is none."""
    return None if module is None else module._trainer


def layer_sync_of(strategy: ParallelStrategy) -> LayerSync | None:
    """What turns a module's batch norms into synchronised ones, if the trainer was asked for it."""
    return strategy._layer_sync


def distributes_samplers(trainer: Trainer) -> bool:
    """Whether Lightning shares the samples of a plain data loader out among the processes."""
    connector = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler and connector.is_distributed)


def loader_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """States of the training data loaders in a checkpoint's dictionary; empty if they have none."""
    found: list[Any] = _fit_loop_state(checkpoint).get("combined_loader", [])
    return found


def set_loader_states(checkpoint: Mapping[str, Any], states: list[Any]) -> None:
    """Put others in their place."""
    _fit_loop_state(checkpoint)["combined_loader"] = states


def _fit_loop_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def batches_processed(trainer: Trainer) -> int:
    """Training batches of the whole run, also before a resume."""
    total = trainer.fit_loop.epoch_loop.batch_progress.total
    assert isinstance(total, _ProcessedTracker)
    return total.processed


def signal_connector_of(trainer: Trainer) -> _SignalConnector:
    """What registers the handlers of signals, when a run starts."""
    return trainer._signal_connector


def set_received_sigterm(trainer: Trainer) -> None:
    """``trainer.received_sigterm`` is true from now on, which ends loops."""
    trainer._signal_connector.received_sigterm = True


def read_directories_by(read: Callable[[Path, bool | None], dict[str, Any]]) -> None:
    """Let all of Lightning load directories too, where it loads a file: in modules and trainers without MoEStrategy.

    Args:
        read: from the path and ``weights_only`` to Lightning's dictionary.
    """

    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | Path) and "://" not in str(path_or_url) and Path(path_or_url).is_dir():
            return read(Path(path_or_url), weights_only)
        return _load(path_or_url, map_location, weights_only)

    for module in (saving, torch_io):
        setattr(module, "pl_load", load)  # noqa: B010  neither exports it


def step_ends(trainer: Trainer) -> bool:
    """Whether the current training batch is the last one of its optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def validation_batches(trainer: Trainer) -> int:
    """Batches that a validation inside of ``fit`` has at least; 0 if its loaders do not know."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    batches = sum(loop.max_batches) if loop._is_sequential else min(loop.max_batches)
    return 0 if batches == float("inf") else int(batches)


def learning_rate_of(finder: LearningRateFinder, module: LightningModule) -> float | None:
    """The value that a finder sets in a module; ``None`` if it sets none."""
    if not finder._update_attr:
        return None
    value = lightning_getattr(module, _determine_lr_attr_name(module, finder._attr_name))
    return float(value) if value else None


def begin_validation_anew(trainer: Trainer) -> Callable[[], None]:
    """Let the progress of a validation inside of ``fit`` look as in its first batch; the function given undoes it.

    A run that goes on from a checkpoint begins such a validation with its first batch, but counts those that are done.
    """
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    done = progress.current.completed
    progress.increment_by(-done, progress.is_last_batch)
    return lambda: progress.increment_by(done, progress.is_last_batch)
