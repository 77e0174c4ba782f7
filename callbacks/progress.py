"""OneLineProgress: the numbers one looks at, in one line."""

from __future__ import annotations

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

    def __init__(self, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate)

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name: _readable(value) for name, value in metrics.items()}


def _readable(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
