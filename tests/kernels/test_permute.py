"""Dispatch and combine within one process: a stable sort by expert, its inverse, and each other's gradient."""

import pytest
import torch
from torch import Tensor

from olmoe_lightning.kernels import combine_rows, dispatch_rows, plan_permutation

ROUTES = {
    "spread": [[0, 2], [3, 0], [2, 1], [1, 3], [0, 1]],
    "one_hot_expert": [[2, 0], [2, 1], [2, 3]],
    "empty_experts": [[3, 1], [1, 3]],
    "one_choice": [[1], [0], [1], [1]],
    "one_token": [[3, 0, 1]],
}
EXPERTS = 4


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES.keys())
def test_rows_are_sorted_by_expert_then_by_token(routes):
    plan = plan_permutation(torch.tensor(routes), EXPERTS)
    expected = [
        (expert, token, token * len(routes[0]) + slot)
        for expert in range(EXPERTS)
        for token, chosen in enumerate(routes)
        for slot, choice in enumerate(chosen)
        if choice == expert
    ]
    assert plan.token_of_row_R.tolist() == [token for _, token, _ in expected]
    assert plan.route_of_row_R.tolist() == [route for _, _, route in expected]
    assert plan.row_of_route_TK.flatten()[plan.route_of_row_R].tolist() == list(range(len(expected)))
    assert plan.offsets_E.dtype == torch.int32
    assert plan.offsets_E.tolist() == [sum(expert <= e for expert, _, _ in expected) for e in range(EXPERTS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES.keys())
def test_combining_what_was_dispatched_gives_each_token_k_times(routes, dtype):
    ids = torch.tensor(routes)
    plan = plan_permutation(ids, EXPERTS)
    # Small integers: every sum is exact in every dtype.
    x = torch.arange(len(routes) * 3).view(len(routes), 3).to(dtype)
    rows = dispatch_rows(x, plan)
    assert torch.equal(rows, x[plan.token_of_row_R])
    y = combine_rows(rows, plan)
    assert y.dtype == dtype
    assert torch.equal(y, x * ids.shape[1])


def scattered(rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    out = rows.new_zeros(count, rows.shape[1])
    for row, token in zip(rows, tokens.tolist(), strict=True):
        out[token] += row
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_other_movement(dtype):
    routes = torch.tensor(ROUTES["spread"])
    plan = plan_permutation(routes, EXPERTS)
    tokens = len(routes)
    generator = torch.Generator().manual_seed(0)

    x = torch.randint(-8, 8, (tokens, 3), generator=generator).to(dtype).requires_grad_()
    grad_rows = torch.randint(-8, 8, (routes.numel(), 3), generator=generator).to(dtype)
    dispatch_rows(x, plan).backward(grad_rows)
    assert torch.equal(x.grad, scattered(grad_rows, plan.token_of_row_R, tokens))

    rows = grad_rows.clone().requires_grad_()
    y = combine_rows(rows, plan)
    assert torch.equal(y, scattered(rows.detach(), plan.token_of_row_R, tokens))
    grad_y = torch.randint(-8, 8, (3, tokens), generator=generator).to(dtype).t()  # not contiguous
    y.backward(grad_y)
    assert torch.equal(rows.grad, grad_y[plan.token_of_row_R])


def test_gradients_pass_a_numerical_check():
    plan = plan_permutation(torch.tensor(ROUTES["spread"]), EXPERTS)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dispatch_rows(x, plan), (x,))
    assert torch.autograd.gradcheck(lambda rows: combine_rows(rows, plan), (rows,))


def test_no_tokens_are_no_rows():
    plan = plan_permutation(torch.empty(0, 2, dtype=torch.int64), EXPERTS)
    x = torch.empty(0, 3, requires_grad=True)
    rows = dispatch_rows(x, plan)
    y = combine_rows(rows, plan)
    assert rows.shape == y.shape == (0, 3)
    assert plan.offsets_E.tolist() == [0] * EXPERTS
    y.sum().backward()
    assert x.grad.shape == (0, 3)
