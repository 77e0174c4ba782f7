"""The order of samples as a pure function of (seed, sample number): no state, no lists, any position at once.

Sample n of a training run is first given to a source of the mixture (:class:`MixtureOrder`), as that source's draw k;
draw k is row ``permutation(k mod R)`` of pass ``k div R`` over the source's R rows (:func:`permute`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from olmoe_lightning.data.common import DataError

BLOCK = 1024  # samples per block of a mixture; proportions are right at every block's end
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ROUNDS = 4


def mix(*values: np.ndarray | int) -> np.ndarray:
    """Hash integers (broadcast against each other) to uint64, with the finaliser of SplitMix64 after each of them.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = (state ^ np.asarray(value, dtype=np.uint64)) * _MIX_1 + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    return state


def permute(positions: np.ndarray, sizes: np.ndarray | int, keys: np.ndarray) -> np.ndarray:
    """Where pseudo-random permutations send given positions, in constant memory.

    Modulo 2**b, adding a constant, multiplying by an odd one and x ^= x >> s are bijections, and so is a chain of them
    with constants from the key. For a size that is no power of two the chain acts on the next one and is repeated until
    it lands below the size (cycle walking), which is again a bijection and takes less than two turns on average.

    Args:
        positions: integers, each in ``[0, size)``.
        sizes: length of the permutation, one for all or one for each position.
        keys: uint64, which permutation; one for all or one for each position.

    Returns:
        int64 of the shape of ``positions``, each in ``[0, size)``.
    """
    shape = np.shape(positions)
    x = np.array(positions, dtype=np.uint64).ravel()
    size = np.broadcast_to(np.asarray(sizes, dtype=np.uint64), shape).ravel()
    key = np.broadcast_to(keys, shape).ravel()
    bits = np.array([max(1, int(s - 1).bit_length()) for s in np.unique(size)], dtype=np.uint64)
    bits = bits[np.searchsorted(np.unique(size), size)]
    mask = (np.uint64(1) << bits) - np.uint64(1)
    shift = (bits + np.uint64(1)) >> np.uint64(1)
    constants = [(mix(key, 2 * i), mix(key, 2 * i + 1) | np.uint64(1)) for i in range(_ROUNDS)]
    walking = np.arange(x.size)
    while walking.size:
        y = x[walking]
        for add, multiply in constants:
            y = ((y + add[walking]) * multiply[walking]) & mask[walking]
            y ^= y >> shift[walking]
        x[walking] = y
        walking = walking[y >= size[walking]]
    return x.astype(np.int64).reshape(shape)


class MixtureOrder:
    """Sample number → (source, draw of that source) for a weighted mixture.

    Samples come in blocks of 1024. A block's number of draws per source is the difference of two closed-form cumulative
    counts, its order is shuffled by (seed, block). Draws of a source are numbered in the order in which they appear, so
    a source is passed through completely before any of its rows comes again.

    Args:
        weights: relative shares of the samples, at least one positive; 0 switches a source off.
        seed: shuffles the blocks.

    Raises:
        DataError: a weight is negative or not finite, or all are zero.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        for i, weight in enumerate(weights):
            if not math.isfinite(weight) or weight < 0:
                raise DataError(f"weight {weight} of source {i} must be zero or positive; 0 switches a source off")
        if not any(weights):
            raise DataError(f"weights {list(weights)} sum to 0: at least one source needs a positive weight")
        self.weights = [float(weight) for weight in weights]
        self.seed = seed
        # Share of each source in what the sources before it have left over; exact, so no rounding can add up.
        exact = [Fraction(weight) for weight in self.weights]
        rest = [sum(exact[i:], Fraction(0)) for i in range(len(exact))]
        self._shares = [w / r if r else Fraction(0) for w, r in zip(exact, rest, strict=True)]
        self._block = lru_cache(maxsize=16)(self._make_block)

    def counts(self, num_samples: int) -> list[int]:
        """Draws of each source among the first ``num_samples`` samples, whole blocks only.

        One source after the other takes its rounded share of what is left. Each of these steps, rounded(p·n) and
        n - rounded(p·n), grows by 0 or 1 when n grows by 1 (p <= 1), hence no count ever falls. The counts sum to n,
        and each is off its exact share by at most half a sample per source up to it, however large n is.
        """
        left, counts = num_samples, []
        for share in self._shares:
            count = (2 * left * share.numerator + share.denominator) // (2 * share.denominator)
            counts.append(count)
            left -= count
        return counts

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and draw of each sample, both int64."""
        samples = np.asarray(samples, dtype=np.int64)
        if len(self.weights) == 1:
            return np.zeros_like(samples), samples
        sources, draws = np.empty_like(samples), np.empty_like(samples)
        blocks = samples // BLOCK
        for block in np.unique(blocks).tolist():
            here = blocks == block
            slot = samples[here] - block * BLOCK
            block_sources, block_draws = self._block(block)
            sources[here], draws[here] = block_sources[slot], block_draws[slot]
        return sources, draws

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        first, last = self.counts(block * BLOCK), self.counts((block + 1) * BLOCK)
        by_source = np.repeat(np.arange(len(first)), np.subtract(last, first))
        sources = by_source[permute(np.arange(BLOCK), BLOCK, mix(self.seed, 1, block))]
        draws = np.empty(BLOCK, dtype=np.int64)
        for source, start in enumerate(first):
            mine = sources == source
            draws[mine] = start + np.arange(np.count_nonzero(mine))
        return sources, draws

    def __getstate__(self) -> dict[str, object]:
        return {"weights": self.weights, "seed": self.seed}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]
