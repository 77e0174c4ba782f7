"""The machine's matrix peak: the best rate of fp32 products, square ones and those of the model's shapes."""

from __future__ import annotations

import time
from typing import Any

import torch

_TIMING_S = 0.01
"""Least time that one timing covers, so that a burst of microseconds does not count as the peak."""


class MatrixPeak:
    """Products to try.

    Args:
        shapes: (rows, inner, columns) of each.
    """

    def __init__(self, shapes: list[tuple[int, int, int]]) -> None:
        self._products = [(f"{m}x{k}x{n}", 2.0 * m * k * n, torch.rand(m, k), torch.rand(k, n)) for m, k, n in shapes]

    def measure(self, seconds: float) -> dict[str, Any]:
        """Time each shape for its share of ``seconds``.

        Returns:
            ``flops``: of the best timing, per second. ``shape``: that reached it. ``by_shape``: the best of each.
        """
        by_shape: dict[str, float] = {}
        with torch.inference_mode():
            for name, work, a, b in self._products:
                by_shape[name] = work / _best_seconds(a, b, seconds / len(self._products))
        shape = max(by_shape, key=lambda name: by_shape[name])
        return {"flops": by_shape[shape], "shape": shape, "by_shape": by_shape}


def _best_seconds(a: torch.Tensor, b: torch.Tensor, budget: float) -> float:
    """Of one product; the first one, untimed, makes room for the result and warms the caches."""
    out = a @ b
    deadline = time.perf_counter() + budget
    repeats, best = 1, float("inf")
    while True:
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        end = time.perf_counter()
        if end - start < _TIMING_S:
            repeats *= 2
            continue
        best = min(best, (end - start) / repeats)
        if end > deadline:
            return best
