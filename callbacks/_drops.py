"""What was dropped beyond the capacity of a communication plugin, from one report to the next."""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch import Tensor

from olmoe_lightning import MoEStrategy


class DropWindow:
    """The drops of a run since the last report; the counters stay on their device until then."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, Tensor]] = {}
        self.counts: dict[str, dict[str, list[float] | float]] = {}
        """Of the last report, over all processes: by plugin, every counter of ``DropCounters`` by name."""

    def report(self, trainer: Trainer) -> dict[str, float]:
        """What ``DropCounters.rates`` says; empty where nothing can be dropped. Collective.

        Of several plugins (layers of different sizes) the rates are those of the one that dropped most.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, MoEStrategy):
            return {}
        now = strategy.own_drops()
        new = {
            plugin: {name: value - self._before[plugin][name] if plugin in self._before else value
                     for name, value in found.items()}
            for plugin, found in now.items()
        }  # fmt: skip
        self._before = now
        total = strategy.sum_of_drops(new)
        self.counts = {
            plugin: {name: value.tolist() for name, value in found.items()} for plugin, found in total.items()
        }
        rates = [strategy.drop_rates(found) for found in total.values()]
        return max(rates, key=lambda each: each["dropped"], default={})
