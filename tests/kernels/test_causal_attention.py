"""Causal attention inside documents against one that is written out, over sizes around the kernel's blocks."""

import math

import pytest
import torch
from torch import Tensor

from olmoe_lightning.kernels import causal_attention, visibility_mask

pytestmark = pytest.mark.usefixtures("kernels")


def definition(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor) -> Tensor:
    """Full score matrices, key heads repeated."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bshc,bthc->bhst", q, k) / math.sqrt(q.shape[-1])
    index = torch.arange(q.shape[1])
    hidden = (index < first_key[:, :, None]) | (index > index[:, None])
    return torch.einsum("bhst,bthc->bshc", scores.masked_fill(hidden[:, None], -math.inf).softmax(-1), v)


def operands(batch: int, seq: int, heads: int, kv_heads: int, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, seq, count, width) for count in (heads, kv_heads, kv_heads)]
    return [(1.5 * torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]


def first_keys(batch: int, seq: int, lengths: list[int]) -> Tensor:
    """Documents of the given lengths, over and over; rolled by one per row so that rows differ."""
    rows = []
    for row in range(batch):
        starts: list[int] = []
        index = row
        while len(starts) < seq:
            starts += [len(starts)] * lengths[index % len(lengths)]
            index += 1
        rows.append(starts[:seq])
    return torch.tensor(rows, dtype=torch.int32)


DOCUMENTS = {"one": None, "single_tokens": [1], "short": [3, 1, 2], "long": [70, 5], "mixed": [1, 64, 2]}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("seq", [1, 7, 63, 64, 65, 130])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_attention_and_its_gradients_equal_the_definition(seq, heads, kv_heads, documents):
    leaves = operands(2, seq, heads, kv_heads)
    first_key = None if documents is None else first_keys(2, seq, documents)
    y = causal_attention(*leaves, first_key)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    starts = torch.zeros(2, seq, dtype=torch.int32) if first_key is None else first_key
    expected = definition(*wide, starts)
    pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # fp32 sums of up to 130 terms of order one.
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=0)
    found, reference = torch.autograd.grad(y, leaves, pull.float()), torch.autograd.grad(expected, wide, pull)
    for ours, theirs in zip(found, reference, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=3e-5, rtol=1e-5)


def test_a_mask_at_hand_changes_nothing():
    leaves = operands(2, 9, 4, 2)
    first_key = first_keys(2, 9, [4, 2])
    with_mask = causal_attention(*leaves, first_key, visibility_mask(first_key))
    assert torch.equal(with_mask, causal_attention(*leaves, first_key))


def test_one_query_against_a_cache_is_the_last_row():
    q, k, v = (leaf.detach() for leaf in operands(2, 9, 4, 2))
    whole = causal_attention(q, k, v)
    torch.testing.assert_close(causal_attention(q[:, -1:], k, v), whole[:, -1:], atol=1e-6, rtol=1e-5)


def test_views_are_read_as_what_they_show():
    q, k, v = (leaf.detach() for leaf in operands(2, 9, 4, 2))
    expected = causal_attention(q, k, v)
    strided = [t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for t in (q, k, v)]
    torch.testing.assert_close(causal_attention(*strided), expected, atol=1e-6, rtol=1e-6)


def test_large_scores_neither_overflow_nor_lose_the_best_key():
    q, k, v = (leaf.detach() for leaf in operands(1, 6, 1, 1))
    y = causal_attention(1e3 * q, 1e3 * k, v)
    best = (q[0, :, 0] @ k[0, :, 0].T).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf).argmax(-1)
    torch.testing.assert_close(y[0, :, 0], v[0, best, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("operand", "touched"), [(0, [5]), (1, [5, 6, 7]), (2, [5, 6, 7])])
def test_nan_is_never_hidden_from_a_query_that_sees_it(operand, touched):
    """Queries that do not see it may show it too: a product with a probability of zero is NaN."""
    leaves = [leaf.detach().clone() for leaf in operands(1, 8, 2, 2)]
    leaves[operand][0, 5] = math.nan
    y = causal_attention(*leaves, torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4]], dtype=torch.int32))
    assert y[0, touched].isnan().all()
