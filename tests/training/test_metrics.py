"""Metrics as sums over tokens: exact for uneven batches and for several processes."""

import math

import pytest
import torch
from torchmetrics.text import Perplexity as LogitsPerplexity

from olmoe_lightning.training.metrics import LanguageModelMetrics, Perplexity, TokenMean, has_label


def test_mean_is_over_tokens_and_not_of_batch_means():
    mean = TokenMean()
    mean.update(torch.tensor(10.0), 1)
    mean.update(torch.tensor(2.0), torch.tensor(3))
    assert mean.compute() == 3.0  # the mean of the batches' means would be 5.33


def test_states_of_several_processes_add_up():
    parts = [TokenMean(), TokenMean()]
    parts[0].update(torch.tensor(10.0), 1)
    parts[1].update(torch.tensor(2.0), 3)
    whole = TokenMean()
    for part in parts:  # what the reduction "sum" of each state does
        whole.total += part.total
        whole.count += part.count
    assert {name: reduction.__name__ for name, reduction in whole._reductions.items()} == {
        "total": "dim_zero_sum",
        "count": "dim_zero_sum",
    }
    assert whole.compute() == 3.0


def test_small_batches_are_not_lost_beside_a_large_sum():
    mean = TokenMean()
    mean.update(torch.tensor(1e9), 0)
    for _ in range(10):
        mean.update(torch.tensor(1.0), 1)
    assert float(mean.total) == 1e9 + 10  # fp32 would still say 1e9


@pytest.mark.parametrize("kind", [TokenMean, Perplexity])
def test_a_mean_of_nothing_is_left_out_and_the_next_one_is_not(kind):
    mean = kind()
    mean.update(torch.tensor(0.0), 0)
    assert mean.compute() is None
    mean.update(torch.tensor(3.0), 3)
    assert mean.compute() == (1.0 if kind is TokenMean else pytest.approx(math.e))


def test_counts_beyond_fp32_are_exact():
    mean = TokenMean()
    mean.update(torch.tensor(0.0), torch.tensor(2**24))
    for _ in range(3):
        mean.update(torch.tensor(0.0), torch.tensor(1))
    assert mean.count == 2**24 + 3
    assert torch.tensor(2.0**24) + 1 == 2**24  # negative control: fp32 counts no further


def test_a_batch_has_a_label_if_one_is_not_ignored():
    assert has_label({"labels": torch.tensor([[-100, 3]])})
    assert not has_label({"labels": torch.tensor([[-100, -100]])})
    assert not has_label({"labels": torch.empty(0, 4, dtype=torch.int64)})
    assert not has_label({"input_ids": torch.tensor([[1]])})


def test_perplexity_of_sums_equals_torchmetrics_of_logits():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = Perplexity(), LogitsPerplexity(ignore_index=-100)
    for rows in (1, 5):
        logits = torch.randn(rows, 7, 11, generator=generator)
        labels = torch.randint(0, 11, (rows, 7), generator=generator)
        labels[0, :3] = -100
        theirs.update(logits, labels)
        total = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        ours.update(total, (labels != -100).sum())
    assert float(ours.compute()) == pytest.approx(float(theirs.compute()), rel=1e-6)


def test_states_stay_double_when_the_module_is_cast():
    metrics = LanguageModelMetrics().to(torch.bfloat16)
    metrics.loss.update(torch.tensor(1.0), 3)
    assert metrics.loss.total.dtype == torch.float64


def test_metrics_add_nothing_to_a_checkpoint():
    metrics = LanguageModelMetrics()
    metrics.set_sources(["a", "b"])
    assert metrics.state_dict() == {}
