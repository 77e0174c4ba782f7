"""Rows in the memory of peers: each stands where the plain definition puts it, and comes home summed."""

import math

import pytest
import torch

from olmoe_lightning.kernels.routes import Window
from olmoe_lightning.kernels.rowwise import (
    count_routes,
    gather_weights,
    plan_routes,
    publish_rows,
    put_rows,
    sum_rows,
)

pytestmark = pytest.mark.usefixtures("kernels")
D = 16


def routing(size, tokens, experts, k, drop, seed=0):
    """Per process: expert ids, weights, what is kept."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rank in range(size):
        count = tokens(rank)
        ids = torch.rand(count, experts, generator=generator).topk(k).indices
        keep = torch.rand(count, k, generator=generator) > 0.3 if drop else None
        parts.append((ids, torch.rand(count, k, generator=generator), keep))
    return parts


def numbers(seed, rows, dtype):
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def definition(parts, size, experts):
    """(process, token, k) of every row of every process."""
    local = experts // size
    rows = []
    for owner in range(size):
        mine = []
        for expert in range(owner * local, (owner + 1) * local):
            for source, (ids, _, keep) in enumerate(parts):
                mine += [
                    (source, t, k) for t, k in (ids == expert).nonzero().tolist() if keep is None or bool(keep[t, k])
                ]
        rows.append(mine)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(
    ("size", "tokens", "experts", "k"),
    [(1, lambda r: 7, 4, 2), (3, lambda r: 5 * r, 6, 3), (2, lambda r: 0, 4, 2), (2, lambda r: 40, 2, 1)],
)
def test_rows_stand_by_expert_source_and_token_and_come_home_summed(size, tokens, experts, k, drop, dtype):
    parts = routing(size, tokens, experts, k, drop)
    x = [
        torch.randn(len(ids), D, generator=torch.Generator().manual_seed(r)).to(dtype)
        for r, (ids, *_) in enumerate(parts)
    ]
    counts = torch.stack([count_routes(ids, keep, experts) for ids, _, keep in parts])
    wanted = definition(parts, size, experts)
    capacity = max(map(len, wanted)) + 2
    windows = [
        Window(torch.full((capacity + 1, D), math.nan, dtype=dtype), torch.full((capacity + 1,), math.nan))
        for _ in range(size)
    ]
    plans = [plan_routes(ids, keep, counts, rank) for rank, (ids, _, keep) in enumerate(parts)]
    for rank, (_, weights, _) in enumerate(parts):
        put_rows(x[rank], weights, plans[rank][0], windows)
    for rank, rows in enumerate(wanted):
        _, received, ends = plans[rank]
        assert ends.dtype == received.dtype == torch.int32
        assert int(ends[-1]) == int(received.sum()) == len(rows)
        for r, (source, t, kk) in enumerate(rows):
            assert torch.equal(windows[rank].rows[r], x[source][t])
            assert windows[rank].weights[r] == parts[source][1][t, kk]
        assert windows[rank].rows[len(rows) : capacity].isnan().all()  # behind them nothing is written

    # Home again: values that show where a row was, in memory full of NaN.
    out = [numbers(9 + r, capacity, dtype) for r in range(size)]
    beside_rows = [torch.arange(capacity) + 1000.0 * rank for rank in range(size)]
    for rank in range(size):
        windows[rank].rows.fill_(math.nan)
        out[rank][len(wanted[rank]) :] = math.nan
    own = [publish_rows(out[r], beside_rows[r], plans[r][1], r, windows[r]) for r in range(size)]
    for rank, (ids, *_) in enumerate(parts):
        routes = plans[rank][0]
        found = sum_rows([own[p] if p == rank else windows[p].rows for p in range(size)], routes)
        beside = gather_weights([window.weights for window in windows], routes)
        expected, numbered = torch.zeros(len(ids), D), torch.zeros(ids.shape)
        for owner, rows in enumerate(wanted):
            for r, (source, t, kk) in enumerate(rows):
                if source == rank:
                    expected[t] += out[owner][r].float()
                    numbered[t, kk] = beside_rows[owner][r]
        assert found.dtype == dtype
        # fp32: sums of at most three numbers in another order. bf16: one rounding.
        torch.testing.assert_close(found.float(), expected, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)
        assert torch.equal(beside, numbered)


def test_the_numbers_of_a_dropped_route_are_minus_one_and_it_counts_nowhere():
    ids, keep = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[True, False], [True, True]])
    counts = count_routes(ids, keep, 2)[None]
    assert counts.tolist() == [[2, 1]]
    routes, received, ends = plan_routes(ids, keep, counts, 0)
    assert routes.row_TK.tolist() == [[0, -1], [2, 1]]
    assert received.tolist() == [[2, 1]]
    assert ends.tolist() == [2, 3]


def test_any_memory_layout_of_tokens_is_taken():
    ids = torch.tensor([[0], [1], [0]])
    routes, *_ = plan_routes(ids, None, count_routes(ids, None, 2)[None], 0)
    window = Window(torch.zeros(4, D), torch.zeros(4))
    x = torch.randn(D, 3).t()
    put_rows(x, torch.ones(3, 2)[:, :1], routes, [window])
    assert torch.equal(window.rows[:3], x[[0, 2, 1]])
