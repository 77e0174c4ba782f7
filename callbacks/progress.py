"""OneLineProgress: the numbers one looks at, in one line."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override


class OneLineProgress(TQDMProgressBar):
    """A progress bar that keeps to one line: losses with three decimals, rates with thousands, no version number.

    It closes before the end of the fit, so what is printed then stays below it.

    Args:
        refresh_rate: batches between two updates.
    """

    reads_weights_between_steps = False

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)

    @property
    @override
    def total_train_batches(self) -> int | float:
        """Batches of this epoch, those before a resume included; Lightning's own count forgets them."""
        trainer, total = self.trainer, self.trainer.num_training_batches
        if trainer.max_epochs == -1 and trainer.max_steps > 0:
            steps = trainer.max_steps - trainer.global_step
            return min(total, _done(trainer) + steps * trainer.accumulate_grad_batches)
        return total

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._begin(trainer)  # a run that resumes inside of an epoch has no start of it

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        total = self.total_train_batches
        bar = self.train_progress_bar
        bar.reset(int(total) if math.isfinite(total) else None)
        bar.set_description(f"Epoch {trainer.current_epoch}")
        bar.initial = bar.n = _done(trainer)  # what was done before must not count in this run's rate

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name: _readable(value) for name, value in metrics.items()}


def _done(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def _readable(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
