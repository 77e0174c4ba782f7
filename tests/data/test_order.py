"""The order of samples: bijective, mixed, exact in its proportions, and the same for every number of ranks."""

import pickle
from collections import Counter

import numpy as np
import pytest

from olmoe_lightning.data import DataError
from olmoe_lightning.data.order import BLOCK, MixtureOrder, mix, permute
from olmoe_lightning.data.sampler import SampleRange


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_permutation_reaches_every_position_once(size):
    for key in range(5):
        assert sorted(permute(np.arange(size), size, mix(key))) == list(range(size))


def test_permutation_of_a_huge_range_costs_nothing_and_stays_inside():
    size = 10**12 + 7
    there = permute(np.arange(1000), size, mix(1))
    assert len(set(there.tolist())) == 1000
    assert there.max() < size
    assert there.max() > size // 2


def test_positions_may_have_different_sizes_and_keys():
    keys = mix(np.arange(3))
    together = permute(np.array([4, 4, 4]), np.array([5, 50, 500]), keys)
    alone = [permute(np.array([4]), size, keys[i])[0] for i, size in enumerate((5, 50, 500))]
    assert together.tolist() == alone


def test_permutation_looks_random():
    # Mean of each quarter of the outputs and the correlation of neighbours, 200 keys: a uniform permutation of 1000 has
    # standard deviations of about 16 and 0.032 per key; the mean over 200 keys is 14 times narrower, we allow 4 sigma.
    size = 1000
    outputs = np.stack([permute(np.arange(size), size, mix(key)) for key in range(200)])
    quarters = outputs.reshape(200, 4, 250).mean(axis=(0, 2))
    assert np.abs(quarters - 499.5).max() < 4 * 16 / 200**0.5
    neighbours = np.mean([np.corrcoef(o[:-1], o[1:])[0, 1] for o in outputs])
    assert abs(neighbours) < 4 * 0.032 / 200**0.5
    fixed = (outputs == np.arange(size)).sum(axis=1)  # Poisson(1): mean of 200 has sigma 0.071
    assert abs(fixed.mean() - 1) < 4 * 0.071
    assert len({tuple(o) for o in outputs.tolist()}) == 200


WEIGHTS = [[1.0], [0.5, 0.5], [3.0, 1.0, 0.0, 2.0], [1e-5, 1.0], [0.1] * 10, [1, 1e-3, 1e3, 7]]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_counts_never_fall_sum_up_and_keep_the_shares(weights):
    order = MixtureOrder(weights, seed=0)
    shares = np.array(weights) / np.sum(weights)
    before = np.zeros(len(weights))
    for n in [*range(0, 5000, 7), 10**6, 10**12]:
        counts = np.array(order.counts(n))
        assert counts.sum() == n
        assert (counts >= before).all()
        assert (np.abs(counts - n * shares) <= 0.5 * len(weights) + 1e-3).all()  # 1e-3: fp64 of n * shares
        before = counts


@pytest.mark.parametrize("weights", WEIGHTS)
def test_draws_of_each_source_are_numbered_without_gap_in_order_of_appearance(weights):
    order = MixtureOrder(weights, seed=3)
    sources, draws = order.locate(np.arange(5 * BLOCK))
    for source in range(len(weights)):
        np.testing.assert_array_equal(draws[sources == source], np.arange((sources == source).sum()))


def test_mixture_is_shuffled_and_depends_on_the_seed():
    sources = [MixtureOrder([0.5, 0.5], seed).locate(np.arange(BLOCK))[0] for seed in (0, 1)]
    # 1024 fair coins: 512 changes of side on average, sigma 16; five sigma on either side
    assert all(432 < np.count_nonzero(np.diff(s)) < 592 for s in sources)
    assert (sources[0] != sources[1]).any()


def test_any_sample_can_be_located_alone():
    order = MixtureOrder([3, 1, 2], seed=5)
    samples = np.array([5, 10**9, 2 * BLOCK, 17, 10**9 + 1])
    together = order.locate(samples)
    alone = [pickle.loads(pickle.dumps(order)).locate(samples[i : i + 1]) for i in range(5)]
    np.testing.assert_array_equal(together[0], [s[0] for s, _ in alone])
    np.testing.assert_array_equal(together[1], [d[0] for _, d in alone])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5], r"weight -0\.5 of source 1"),
        ([float("nan")], r"weight nan of source 0"),
        ([0.0, 0], r"sum to 0"),
        ([], r"sum to 0"),
    ],
)
def test_impossible_weights_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        MixtureOrder(weights, seed=0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_laid_end_to_end_are_the_batches_of_one_process(ranks):
    global_batch, num_batches, first = 12, 5, 1000
    size = global_batch // ranks
    parts = [list(SampleRange(range(60), ranks, rank, size, num_batches, lambda epoch: first)) for rank in range(ranks)]
    batches = [np.concatenate([part[i * size : (i + 1) * size] for part in parts]) for i in range(num_batches)]
    np.testing.assert_array_equal(np.concatenate(batches), first + np.arange(60))
    assert Counter(np.concatenate(batches).tolist()).most_common(1)[0][1] == 1
