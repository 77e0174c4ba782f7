"""How long work takes on a device: events on a GPU, the wall clock on a CPU; ways alternate, with cold caches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _timing import Summary, paired_ratios, summarize, turn_order
from torch import Tensor

Work = Callable[[], object]


class Clock:
    """Times work on one device.

    Args:
        device: a GPU, or the CPU where only the script itself is to be tried.
        seconds: that one comparison may take per way, warm-up aside.
        most: repetitions.
        least: repetitions, whatever they take.
    """

    def __init__(self, device: torch.device, seconds: float = 0.2, most: int = 40, least: int = 7) -> None:
        self.device, self.seconds, self.most, self.least = device, seconds, most, least
        self._cold: Tensor | None = None
        if device.type == "cuda":
            # Many times the L2 cache: writing it also keeps the device busy while the host queues the work, so that
            # what is measured does not wait for the host, as far as a quarter of a millisecond goes.
            self._cold = torch.empty(1 << 30, dtype=torch.uint8, device=device)

    def once(self, work: Work) -> float:
        """Seconds of one repetition, with nothing of it in the L2 cache before."""
        if self._cold is None:
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        self._cold.fill_(1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def race(self, ways: dict[str, Work]) -> Race:
        """Repeat all ways alternately, a different one first each time.

        Args:
            ways: what does the same work, by name.
        """
        names = list(ways)
        for name in names:  # compiles, allocates, and lets libraries choose
            self.once(ways[name])
        single = max(self.once(ways[name]) for name in names)
        repetitions = int(min(max(self.seconds / max(single, 1e-6), self.least), self.most))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for index in range(repetitions):
            for name in turn_order(names, index):
                seconds[name].append(self.once(ways[name]))
        return Race({name: summarize(values) for name, values in seconds.items()})


@dataclass(frozen=True)
class Race:
    """Seconds of each way; the same repetition of all of them ran side by side."""

    seconds: dict[str, Summary]

    def faster(self, name: str, than: str) -> float:
        """How many times as fast one way is as another, the median over repetitions."""
        return paired_ratios(self.seconds[than].rounds, self.seconds[name].rounds).median
