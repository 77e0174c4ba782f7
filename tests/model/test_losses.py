"""Head and cross entropy in one against F.cross_entropy, and how a layer's own loss joins the backward pass."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmoe_lightning.model import losses
from olmoe_lightning.model.losses import IGNORE_INDEX, attach_loss, linear_cross_entropy

pytestmark = pytest.mark.usefixtures("kernels")

TOKENS, WIDTH, VOCAB = 13, 8, 29

# fp32: sums of 13 to 29 terms of order one, in another order. bf16: each logit's gradient and the results are rounded
# to 8 bits, half of 2^-7 relative to the largest entry, and 13 to 29 of them add up.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
LABELS = {
    "all_count": [],
    "some_ignored": [0, 5, 6, 12],
    "first_chunks_ignored": [0, 1, 2, 3, 4, 5, 6],
    "one_counts": [i for i in range(TOKENS) if i != 9],
    "none_counts": list(range(TOKENS)),
}


@pytest.fixture(params=[1, 4, 5, 1000], ids=lambda rows: f"chunks_of_{rows}")
def chunked(request, monkeypatch):
    """Several chunks, a last one that is not full, and the usual single one."""
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", request.param * VOCAB)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def reference(x: Tensor, weight: Tensor, labels: Tensor, z_coeff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Total, cross entropies and z-sum in fp64, with gradients in the leaves that are returned by autograd."""
    logits = x.double() @ weight.double().T
    per_token = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    z = logits.logsumexp(-1).square()[labels != IGNORE_INDEX].sum()
    return per_token.sum() + z_coeff * z, per_token, z


def assert_close_to_largest(found: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = max(expected.abs().max().item(), 1e-30)
    assert ((found.double() - expected).abs().max() / scale) <= tolerance


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("z_coeff", [0.0, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ignored", LABELS.values(), ids=LABELS.keys())
def test_value_and_both_gradients_equal_cross_entropy_plus_z_loss(ignored, dtype, z_coeff):
    x, weight, labels = operands(dtype)
    labels[ignored] = IGNORE_INDEX
    found = linear_cross_entropy(x, weight, labels, z_coeff)
    total, per_token, z = reference(x, weight, labels, z_coeff)
    # The products themselves are rounded to the operands' dtype.
    atol = 1e-4 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(found.cross_entropy_N.double(), per_token, atol=atol, rtol=0)
    torch.testing.assert_close(found.total.double(), total, atol=atol, rtol=TOLERANCE[dtype])
    torch.testing.assert_close(found.z.double(), z, atol=atol, rtol=TOLERANCE[dtype])
    assert [value.dtype for value in found] == [torch.float32, torch.float32, torch.float64]
    assert (found.cross_entropy_N[ignored] == 0).all()

    # A mean over 7 tokens: the incoming gradient must be applied, once.
    expected = torch.autograd.grad(total / 7, (x, weight))
    (found.total / 7).backward()
    for leaf, grad in zip((x, weight), expected, strict=True):
        assert leaf.grad.dtype == dtype
        if len(ignored) == TOKENS:
            assert torch.equal(leaf.grad, torch.zeros_like(leaf.grad))
        else:
            assert_close_to_largest(leaf.grad, grad.double(), TOLERANCE[dtype])


def test_the_z_loss_is_a_visible_part_of_the_gradient():
    """Negative control of the test above."""
    grads = []
    for z_coeff in (0.0, 1e-2):
        x, weight, labels = operands()
        linear_cross_entropy(x, weight, labels, z_coeff).total.backward()
        grads.append(weight.grad)
    assert (grads[1] - grads[0]).abs().max() / grads[0].abs().max() > 100 * TOLERANCE[torch.float32]


def test_chunks_do_not_change_the_value_of_a_token(monkeypatch):
    x, weight, labels = operands()
    whole = linear_cross_entropy(x, weight, labels).cross_entropy_N
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", 1)  # less than a row: still one row at a time
    torch.testing.assert_close(linear_cross_entropy(x, weight, labels).cross_entropy_N, whole, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("chunked")
def test_without_gradients_the_values_are_the_same():
    x, weight, labels = operands()
    labels[:4] = IGNORE_INDEX
    with_grad = linear_cross_entropy(x, weight, labels, 1e-2)
    with torch.no_grad():
        without = linear_cross_entropy(x, weight, labels, 1e-2)
    assert not without.total.requires_grad
    for a, b in zip(with_grad, without, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=1e-6)


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_the_wanted_gradient_is_made(wanted):
    x, weight, labels = operands()
    grads = torch.autograd.grad(reference(x, weight, labels, 0.0)[0], (x, weight))
    (weight if wanted == "x" else x).requires_grad_(False)
    linear_cross_entropy(x, weight, labels).total.backward()
    if wanted == "x":
        assert_close_to_largest(x.grad, grads[0].double(), 1e-5)
        assert weight.grad is None
    else:
        assert_close_to_largest(weight.grad, grads[1].double(), 1e-5)
        assert x.grad is None


def test_only_the_total_carries_a_gradient():
    x, weight, labels = operands()
    found = linear_cross_entropy(x, weight, labels)
    assert found.total.requires_grad
    assert not found.cross_entropy_N.requires_grad
    assert not found.z.requires_grad


def test_no_tokens_cost_nothing():
    x, weight, labels = operands()
    x = x.detach()[:0].requires_grad_()
    found = linear_cross_entropy(x, weight, labels[:0], 1e-2)
    found.total.backward()
    assert found.total == 0
    assert x.grad.shape == (0, WIDTH)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("size", [1e4, 1e17])
def test_logits_of_any_size_stay_finite_and_right(size):
    x, weight, labels = operands()
    with torch.no_grad():
        x *= size
    found = linear_cross_entropy(x, weight, labels, 1e-2)
    found.total.backward()
    total, _, z = reference(x, weight, labels, 1e-2)
    torch.testing.assert_close(found.total.double(), total, atol=0, rtol=1e-5)
    torch.testing.assert_close(found.z, z, atol=0, rtol=1e-5)
    for leaf, grad in zip((x, weight), torch.autograd.grad(total, (x, weight)), strict=True):
        assert_close_to_largest(leaf.grad, grad.double(), 1e-5)


@pytest.mark.parametrize("label", [-1, VOCAB, 2**40])
def test_a_label_outside_of_the_vocabulary_is_refused_before_memory_is_touched(label):
    x, weight, labels = operands()
    labels[3] = label
    with pytest.raises((IndexError, RuntimeError), match=r"vocabulary of 29|out of bounds"):
        linear_cross_entropy(x, weight, labels)


def test_a_second_derivative_is_refused_rather_than_wrong():
    x, weight, labels = operands()
    factor = torch.tensor(2.0, requires_grad=True)
    (grad,) = torch.autograd.grad(factor * linear_cross_entropy(x, weight, labels).total, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_the_loss_of_a_uniform_prediction_is_log_vocabulary():
    x, weight, labels = operands()
    found = linear_cross_entropy(torch.zeros_like(x), weight, labels)
    torch.testing.assert_close(found.cross_entropy_N, torch.full((TOKENS,), math.log(VOCAB)))


# -------------------------------------------------------------------------------------------------------- attach_loss


@pytest.mark.parametrize("scale", [0.0, 1.0, 1 / 3, 1e-4, -2.0])
def test_an_attached_loss_receives_exactly_its_scale_whatever_the_main_loss_does(scale):
    for outer in (1.0, 5.0):
        x = torch.randn(3, 4, requires_grad=True)
        aux = torch.tensor(7.0, requires_grad=True)
        y = attach_loss(x, aux, torch.tensor(scale))
        assert torch.equal(y, x)
        grad = torch.randn(3, 4)
        (outer * y).backward(grad)
        assert torch.equal(aux.grad, torch.tensor(scale))
        assert torch.equal(x.grad, outer * grad)


def test_an_attached_loss_reaches_its_parameters_even_if_x_needs_no_gradient():
    weight = torch.tensor(3.0, requires_grad=True)
    y = attach_loss(torch.ones(2), weight.square(), torch.tensor(0.5))
    y.sum().backward()
    assert weight.grad == 0.5 * 2 * 3.0


def test_two_attached_losses_and_accumulation_add_up_once_each():
    weight = torch.tensor(3.0, requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):  # two microbatches
        y = attach_loss(x, weight.square(), torch.tensor(0.25))
        y = attach_loss(y.relu(), 2 * weight, torch.tensor(0.5))
        y.sum().backward()
    assert weight.grad == 2 * (0.25 * 6 + 0.5 * 2)
    assert torch.equal(x.grad, torch.full((2,), 2.0))
