"""A learning rate that ``LearningRateFinder`` has found, in all that was made from the one before.

Lightning sets it in the module and, as it is, in every group of the optimizer. A schedule remembers the rates from
which it was made, and sets its own at the next step; groups whose rate was a multiple lose that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from olmoe_lightning._lightning import learning_rate_of
from olmoe_lightning._torch import parts_of_schedule, set_last_rates

_OF_GROUPS = ("initial_lr", "max_lr", "min_lr")
_OF_SCHEDULES = ("base_lrs", "max_lrs")


def keep_proportions(
    find: Callable[[], None],
    finder: LearningRateFinder,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    schedules: Callable[[], Iterable[LRSchedulerConfig]],
) -> None:
    """Search, and then scale all rates of groups and schedules as the module's own was scaled.

    Args:
        find: the search.
        finder: what searches.
        module: whose rate is sought.
        optimizers: of the run.
        schedules: of the run, asked for after the search.
    """
    before = learning_rate_of(finder, module)
    rates = [[_copy(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
    find()
    after = learning_rate_of(finder, module)
    if before is None or after is None or after == before:
        return
    for optimizer, old in zip(optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, old, strict=True):
            group["lr"] = rate * (after / before)
            group |= {key: group[key] * (after / before) for key in _OF_GROUPS if key in group}
    for config in schedules():
        for part in parts_of_schedule(config.scheduler):
            for key in _OF_SCHEDULES:
                if hasattr(part, key):
                    setattr(part, key, [rate * (after / before) for rate in getattr(part, key)])
            set_last_rates(part, [_copy(group["lr"]) for group in part.optimizer.param_groups])


def _copy(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, Tensor) else rate
