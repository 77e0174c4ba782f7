"""What a communication plugin had no room for, from one report to the next."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor


class DropWindow:
    """The drops of a run's plugins since the last report; the counters stay on their device until then."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []
        self.counts: dict[str, list[float]] = {}
        """Of the last report, over all processes: every counter of ``DropCounters``, by name."""

    def report(self, trainer: Trainer) -> dict[str, float]:
        """What ``DropCounters.rates`` says; empty where nothing can be dropped. Collective, a reduction each plugin.

        Several plugins (layers of different sizes) are added up, as far as they have equally many experts.
        """
        strategy: Any = trainer.strategy
        counters = [plugin.drops for plugin in getattr(strategy, "comm_plugins", ()) if plugin.drops is not None]
        now = [each.flat() for each in counters]
        before = self._before if len(self._before) == len(now) else [each.new_zeros(()) for each in now]
        self._before = now
        total: dict[str, Tensor] = {}
        for each, values, old in zip(counters, now, before, strict=True):
            # The device's part is over here; a copy to the host follows.
            for name, value in each.from_flat(strategy.reduce(values - old, reduce_op="sum")).items():
                if name not in total or total[name].shape == value.shape:
                    total[name] = total[name] + value if name in total else value
        self.counts = {name: value.tolist() for name, value in total.items()}
        return counters[0].rates(total) if total else {}
