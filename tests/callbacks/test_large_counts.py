"""Counters of long runs: 2^24 tokens and more, where fp32 counts no further."""

import pytest
import torch

from olmoe_lightning.callbacks.expert_load import RoutingSums, load_metrics
from olmoe_lightning.callbacks.throughput import _Window
from olmoe_lightning.model import RoutingStats
from olmoe_lightning.plugins.comm import DropCounters

MANY = 2**24


def stats(counts: list[int]) -> RoutingStats:
    """One batch of one layer, top-1."""
    tokens = sum(counts)
    probabilities = torch.tensor([counts], dtype=torch.float32)
    number = torch.tensor([float(tokens)])
    return RoutingStats(torch.tensor([counts]), probabilities, number, number.double(), number, torch.tensor(tokens))


def test_fp32_counts_no_further():
    """Negative control of the tests below."""
    assert torch.tensor(float(MANY)) + 1 == MANY


def test_loads_of_many_small_batches_after_a_large_one_are_exact():
    window = RoutingSums.zeros(1, 2, torch.device("cpu"))
    window.add(stats([MANY, MANY]))
    for _ in range(5):
        window.add(stats([1, 0]))
    assert window.counts.tolist() == [[MANY + 5, MANY]]
    assert RoutingSums.from_flat(window.flat(), 1, 2).counts.tolist() == [[MANY + 5, MANY]]
    found = load_metrics(window, top_k=1)
    assert found["max_over_mean"].item() == pytest.approx(2 * (MANY + 5) / (2 * MANY + 5), rel=1e-15)
    assert found["balance_loss"].item() == found["router_entropy"].item() == 1.0


def test_statistics_of_batches_that_are_merged_keep_every_token():
    merged = stats([MANY, 0])
    for _ in range(5):
        merged = merged.merge(stats([1, 0]))
    assert merged.counts.tolist() == [[MANY + 5, 0]]
    assert merged.num_tokens == MANY + 5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_a_window_of_throughput_counts_every_token(dtype):
    window = _Window(0.0)
    window.add_count("supervised", torch.tensor(MANY, dtype=dtype))
    for _ in range(5):
        window.add_count("supervised", torch.tensor(1, dtype=dtype))
    window.fetch_counts()
    assert window.fetched_counts() == {"supervised": MANY + 5}


def test_drops_are_counted_one_by_one():
    counters = DropCounters(2, 1, torch.device("cpu"))
    counters.routes += MANY
    counters.dropped_by_expert += torch.tensor([MANY, 0])
    counters.weight_removed_by_expert += torch.tensor([float(MANY), 0.0])
    ids = torch.tensor([[0]])
    for _ in range(5):
        counters.add(ids, ids, torch.tensor([[False]]), torch.tensor([[1.0]]))
    assert counters.routes == MANY + 5
    assert counters.dropped_by_expert.tolist() == [MANY + 5, 0]
    assert counters.weight_removed_by_expert.tolist() == [MANY + 5, 0]
    assert DropCounters.rates(counters.read())["dropped"] == 1.0
