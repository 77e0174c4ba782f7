"""The end of a run that the command line has started: it is in a checkpoint, and says whether anything was trained."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from olmoe_lightning.strategy import MoEStrategy, NonFiniteError
from olmoe_lightning.training.signals import last_path


class EndOfRun(Callback):
    """Saves the last step, if no checkpoint callback has, as the last checkpoint of the first ``ModelCheckpoint``.

    Raises:
        NonFiniteError: every optimizer step was skipped.
    """

    def __init__(self) -> None:
        self._saved = -1

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = trainer.global_step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        if not callbacks or trainer.fast_dev_run or self._saved == trainer.global_step:  # type: ignore[attr-defined]
            return
        path = last_path(trainer, callbacks[0])
        trainer.save_checkpoint(path, callbacks[0].save_weights_only)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, MoEStrategy) and trainer.strategy.skipped_all:
            raise NonFiniteError(
                f"all {trainer.strategy.skipped_steps} optimizer steps were skipped, because a loss or gradient of "
                "each was not finite: nothing was trained; look at data and learning rate, or stop at the first one "
                "with --trainer.strategy.init_args.on_non_finite=raise"
            )
