"""A backward pass that is after some gradients only computes those, and they are the same as all at once."""

import pytest
import torch

from olmoe_lightning.kernels import expert_mlp, grouped_mm
from olmoe_lightning.kernels.needed import needed_grads, not_leaf


class Product(torch.autograd.Function):
    """Appends to a list what its backward passes are asked for."""

    @staticmethod
    def forward(ctx, x, w, found):
        ctx.save_for_backward(x, w)
        ctx.found = found
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        ctx.found.append(needed_grads(ctx, 2))
        return grad @ w.T, x.T @ grad, None


@pytest.fixture
def leaves():
    return torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)


def asked(x, w, inputs):
    found = []
    loss = Product.apply(x * 2, w, found).sum()
    if inputs is None:
        loss.backward()
    else:
        torch.autograd.grad(loss, inputs)
    return found


def test_input_and_weight_gradients_are_computed_only_where_they_are_needed(leaves):
    x, w = leaves
    assert asked(x, not_leaf(w), None) == [(True, True)]
    assert asked(x, not_leaf(w), [x, w]) == [(True, True)]
    assert asked(x, not_leaf(w), [x]) == [(True, False)]
    assert asked(x, not_leaf(w), [w]) == [(False, True)]
    assert asked(x.detach(), not_leaf(w), [w]) == [(False, True)]
    w.requires_grad_(False)
    assert asked(x, not_leaf(w), None) == [(True, False)]


def test_of_a_leaf_the_gradient_counts_as_asked_for(leaves):
    x, w = leaves
    assert asked(x, w, [x]) == [(True, True)]


def experts(rows, gate_up, down, weights):
    return expert_mlp(rows * 1, gate_up, down, weights * 1, torch.tensor([4, 4, 8], dtype=torch.int32))


def product(rows, gate_up):
    return grouped_mm(rows * 1, gate_up, torch.tensor([4, 4, 8], dtype=torch.int32))


def inputs_of(function):
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4), (3, 6, 4), (3, 4, 3), (8,)] if function is experts else [(8, 4), (3, 6, 4)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("function", [experts, product])
@pytest.mark.parametrize("threads", [1, 2])
def test_experts_give_the_same_gradients_at_once_and_apart(function, threads):
    torch.set_num_threads(threads)
    inputs = inputs_of(function)
    loss = function(*inputs).square().sum()
    whole = torch.autograd.grad(loss, inputs, retain_graph=True)
    for each, expected in zip(inputs, whole, strict=True):
        (alone,) = torch.autograd.grad(loss, [each], retain_graph=True)
        assert torch.equal(alone, expected)
    loss.backward()
    for each, expected in zip(inputs, whole, strict=True):
        assert torch.equal(each.grad, expected)
