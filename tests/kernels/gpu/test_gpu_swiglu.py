"""Triton's SwiGLU, interpreted: value and all gradients are the PyTorch reference's."""

import math
import mmap

import pytest
import torch
from torch import Tensor

from olmoe_lightning.kernels import swiglu
from olmoe_lightning.kernels.choice import interpreted_kernels
from olmoe_lightning.kernels.gpu import swiglu as gpu
from olmoe_lightning.kernels.swiglu import _backward, _forward

UNRESERVED = 0x4000  # MAP_NORESERVE: Python 3.11 has no name for it

# All compute in fp32; sigmoids differ in the last bits, and sums in their order. Halves: PyTorch rounds once, Triton's
# interpreter cuts, which may be an ulp apart.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-6, 2**-7), torch.float16: (1e-6, 2**-10)}


def operands(rows: int, hidden: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = 3 * torch.randn(rows, 2 * hidden, generator=generator)
    grad = torch.randn(rows, hidden, generator=generator)
    return gate_up.to(dtype), torch.rand(rows, generator=generator), grad.to(dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(5, 6), (1, 1), (130, 16), (3, 1030), (2, 2048)], ids=str)
def test_value_and_gradients_are_the_references(shape, dtype, weighted):
    gate_up, weights, grad = operands(*shape, dtype)
    row_weights = weights if weighted else None
    found = (gpu.forward(gate_up, row_weights), *gpu.backward(grad, gate_up, row_weights))
    expected = (_forward(gate_up, row_weights), *_backward(grad, gate_up, row_weights))
    atol, rtol = TOLERANCE[dtype]
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert one.dtype == other.dtype
        scale = shape[1] ** 0.5 if one.ndim == 1 else 1  # the weights' gradients are sums over a row
        torch.testing.assert_close(one, other, atol=atol * scale, rtol=max(rtol, 1e-5) if one.ndim > 1 else 1e-5)


def test_rows_that_hold_nan_keep_it_to_themselves():
    gate_up, weights, grad = operands(9, 40)
    clean = (gpu.forward(gate_up, weights), *gpu.backward(grad, gate_up, weights))
    gate_up[4:6] = weights[4:6] = grad[4:6] = math.nan
    found = (gpu.forward(gate_up, weights), *gpu.backward(grad, gate_up, weights))
    others = [0, 1, 2, 3, 6, 7, 8]
    for one, other in zip(found, clean, strict=True):
        assert one[4:6].isnan().all()
        assert torch.equal(one[others], other[others])


def test_large_gates_neither_overflow_nor_lose_their_gradient():
    gate_up = torch.tensor([[200.0, -200.0, 3.0, 3.0]])
    torch.testing.assert_close(gpu.forward(gate_up, None), torch.tensor([[600.0, 0.0]]))
    grad_gate_up, _ = gpu.backward(torch.ones(1, 2), gate_up, None)
    torch.testing.assert_close(grad_gate_up, torch.tensor([[3.0, 0.0, 200.0, 0.0]]))


@pytest.mark.parametrize("layout", ["strided_rows", "transposed", "expanded"])
def test_any_memory_layout_is_taken(layout):
    gate_up, weights, grad = operands(7, 20)
    if layout == "strided_rows":
        padded = (torch.cat([each, torch.full_like(each, math.nan)], 1) for each in (gate_up, grad))
        gate_up, grad = (each[:, : each.shape[1] // 2] for each in padded)
        weights = torch.stack([weights, weights], -1)[:, 0]
    elif layout == "transposed":
        gate_up, grad = (each.t().contiguous().t() for each in (gate_up, grad))
    else:  # what sum() sends back
        grad = grad[:1, :1].expand_as(grad)
    assert not grad.is_contiguous()
    found = (gpu.forward(gate_up, weights), *gpu.backward(grad, gate_up, weights))
    dense = [each.contiguous() for each in (grad, gate_up, weights)]
    expected = (gpu.forward(*dense[1:]), *gpu.backward(*dense))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_leading_dimensions_are_kept_and_no_rows_are_taken():
    gate_up, _, grad = operands(6, 8)
    assert torch.equal(gpu.forward(gate_up.view(2, 3, 16), None), gpu.forward(gate_up, None).view(2, 3, 8))
    found, _ = gpu.backward(grad.view(2, 3, 8), gate_up.view(2, 3, 16), None)
    assert torch.equal(found, gpu.backward(grad, gate_up, None)[0].view(2, 3, 16))
    for shape in ((0, 8), (4, 0)):
        empty, weights = torch.empty(shape), torch.ones(shape[0])
        assert gpu.forward(empty, weights).shape == (shape[0], shape[1] // 2)
        grad_gate_up, grad_weights = gpu.backward(torch.empty(shape[0], shape[1] // 2), empty, weights)
        assert grad_gate_up.shape == shape
        assert torch.equal(grad_weights, torch.zeros(shape[0]))


def test_rows_far_behind_two_to_the_31_numbers_are_found():
    """Memory that is never touched costs nothing: 4.3 GB of it here."""
    stride = 2**30 + 8
    memory = mmap.mmap(-1, 6 * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED)
    far = torch.frombuffer(memory, dtype=torch.bfloat16).view(3, stride)
    assert 2 * far.stride(0) > 2**31
    gate_up, weights, grad = operands(3, 8, torch.bfloat16)
    expected = (gpu.forward(gate_up, weights), *gpu.backward(grad, gate_up, weights))
    far[:, :16] = gate_up
    assert torch.equal(gpu.forward(far[:, :16], weights), expected[0])
    far[:, 16:24] = grad
    for one, other in zip(gpu.backward(far[:, 16:24], far[:, :16], weights), expected[1:], strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def used(monkeypatch):
    names = []
    for name in ("forward", "backward"):
        kernel = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda *args, kernel=kernel, name=name: (names.append(name), kernel(*args))[1])
    return names


def run(dtype: torch.dtype, weight_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    gate_up, weights, grad = operands(5, 6, dtype)
    gate_up, weights = gate_up.requires_grad_(), weights.to(weight_dtype).requires_grad_()
    y = swiglu(gate_up, weights)
    y.backward(grad)
    return [y.detach(), gate_up.grad, weights.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_function_of_the_package_takes_the_kernels(used, dtype):
    expected = run(dtype)
    assert not used
    with interpreted_kernels():
        found = run(dtype)
    assert used == ["forward", "backward"]
    atol, rtol = TOLERANCE[dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


def test_fp64_and_weights_of_other_dtypes_keep_the_reference(used):
    with interpreted_kernels():
        run(torch.float64)
        run(torch.bfloat16, weight_dtype=torch.float64)
    assert not used


def test_gradients_of_gradients_are_the_references(used):
    def second() -> Tensor:
        gate_up, weights, grad = operands(3, 4)
        gate_up.requires_grad_()
        first = torch.autograd.grad(swiglu(gate_up, weights), gate_up, grad, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), gate_up)[0]

    expected = second()
    with interpreted_kernels():
        found = second()
    assert used == ["forward"]
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected)
