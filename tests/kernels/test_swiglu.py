"""SwiGLU with the row weight folded in equals the formula composed of torch's own parts, with all gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmoe_lightning.kernels import swiglu


def composed(gate_up: Tensor, row_weights: Tensor | None = None) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = F.silu(gate) * up
    return hidden if row_weights is None else hidden * row_weights[:, None]


def operands(dtype: torch.dtype, rows: int = 7, hidden: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = 3 * torch.randn(rows, 2 * hidden, generator=generator, dtype=torch.float64)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)
    grad = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
    return gate_up.to(dtype), weights, grad.to(dtype)


# fp32: a few roundings of values up to some tens. bf16: everything happens in fp32, so the error is one final rounding,
# half of 2^-7 relative; the reference starts from the same bf16 values.
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-6, 2**-8)}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_value_and_gradients_equal_the_composed_formula(dtype, weighted):
    atol, rtol = TOLERANCE[dtype]
    gate_up, weights, grad = operands(dtype)
    weight_dtype = torch.promote_types(dtype, torch.float32)
    ours = [gate_up.clone().requires_grad_(), *([weights.to(weight_dtype).requires_grad_()] if weighted else [])]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    found, expected = swiglu(*ours), composed(*theirs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)
    found.backward(grad)
    expected.backward(grad.double())
    for tensor, reference in zip(ours, theirs, strict=True):
        assert tensor.grad.dtype == tensor.dtype
        torch.testing.assert_close(tensor.grad.double(), reference.grad, atol=atol, rtol=rtol)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_pass_a_numerical_check(weighted):
    gate_up, weights, _ = operands(torch.float64, rows=3, hidden=2)
    inputs = (gate_up.requires_grad_(), *([weights.requires_grad_()] if weighted else []))
    assert torch.autograd.gradcheck(swiglu, inputs)


def test_a_weight_scales_its_row_alone():
    gate_up, _, _ = operands(torch.float32)
    weights = torch.tensor([0.0, 1.0, 2.0, 0.5, 4.0, -1.0, 0.25])  # powers of two: exact
    assert torch.equal(swiglu(gate_up, weights), swiglu(gate_up) * weights[:, None])


def test_leading_dimensions_are_kept():
    gate_up, _, _ = operands(torch.float32, rows=6)
    assert torch.equal(swiglu(gate_up.view(2, 3, -1)), swiglu(gate_up).view(2, 3, -1))


def test_large_gates_neither_overflow_nor_lose_their_gradient():
    gate_up = torch.tensor([[200.0, -200.0, 3.0, 3.0]], requires_grad=True)
    y = swiglu(gate_up)
    y.sum().backward()
    torch.testing.assert_close(y, torch.tensor([[600.0, 0.0]]))
    torch.testing.assert_close(gate_up.grad, torch.tensor([[3.0, 0.0, 200.0, 0.0]]))


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_a_gradient_in_any_memory_layout_is_taken(layout):
    gate_up, weights, grad = operands(torch.float32)
    grad = grad[:1, :1].expand_as(grad) if layout == "expanded" else grad.t().contiguous().t()
    assert not grad.is_contiguous()
    first, second = gate_up.clone().requires_grad_(), gate_up.clone().requires_grad_()
    swiglu(first, weights.float()).backward(grad)
    swiglu(second, weights.float()).backward(grad.contiguous())
    torch.testing.assert_close(first.grad, second.grad, atol=0, rtol=1e-6)


def test_no_rows_are_taken():
    gate_up = torch.empty(0, 8, requires_grad=True)
    weights = torch.empty(0, requires_grad=True)
    y = swiglu(gate_up, weights)
    assert y.shape == (0, 4)
    y.sum().backward()
    assert gate_up.grad.shape == (0, 8)
    assert weights.grad.shape == (0,)
