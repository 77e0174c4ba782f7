"""The grouped product equals a loop over the experts, forward and backward, and nothing leaks from padding rows."""

import math

import pytest
import torch
from torch import Tensor

from olmoe_lightning.kernels import grouped_mm

SIZES = {
    "even": [4, 4, 4, 4],
    "ragged": [3, 1, 7, 2],
    "empty_experts": [0, 5, 0, 3],
    "first_and_last_empty": [0, 4, 2, 0],
    "one_hot_expert": [0, 0, 16, 0],
    "one_row": [0, 1, 0, 0],
    "no_rows": [0, 0, 0, 0],
}
WIDTHS = (6, 5)  # K, N

# fp32 and fp64: sums of at most 16 products, in whatever order. bf16: the library may round partial sums and the result
# to 8 bits, of values up to about 6.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def operands(sizes: list[int], tail: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, weights, and a gradient of the result; the tail's rows hold NaN."""
    generator = torch.Generator().manual_seed(0)
    k, n = WIDTHS
    rows = sum(sizes) + tail
    x = torch.randn(rows, k, generator=generator, dtype=torch.float64).to(dtype)
    w = torch.randn(len(sizes), n, k, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(rows, n, generator=generator, dtype=torch.float64).to(dtype)
    if tail:
        x[-tail:] = math.nan
        grad[-tail:] = math.nan
    return x.requires_grad_(), w.requires_grad_(), grad


def loop(x: Tensor, w: Tensor, grad: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Result and both gradients in fp64, expert by expert; zero for padding rows."""
    x, w, grad = x.detach().double(), w.detach().double(), grad.double()
    y, grad_x, grad_w = grad.new_zeros(grad.shape), x.new_zeros(x.shape), w.new_zeros(w.shape)
    start = 0
    for expert, size in enumerate(sizes):
        for row in range(start, start + size):
            y[row] = w[expert] @ x[row]
            grad_x[row] = grad[row] @ w[expert]
            grad_w[expert] += torch.outer(grad[row], x[row])
        start += size
    return y, grad_x, grad_w


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_result_and_gradients_equal_a_loop_and_the_tail_never_leaks(sizes, tail, dtype):
    x, w, grad = operands(sizes, tail, dtype)
    y = grouped_mm(x, w, ends(sizes))
    y.backward(grad)
    assert y.dtype == dtype
    for found, expected in zip((y, x.grad, w.grad), loop(x, w, grad, sizes), strict=True):
        assert found is not None
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_rows_get_a_gradient_of_exact_zeros(dtype):
    x, w, grad = operands(SIZES["empty_experts"], 2, dtype)
    grouped_mm(x, w, ends(SIZES["empty_experts"])).backward(grad)
    assert torch.equal(w.grad[[0, 2]], torch.zeros_like(w.grad[[0, 2]]))
    assert w.grad[1].abs().min() > 0  # negative control


@pytest.mark.parametrize("sizes", [SIZES["empty_experts"], SIZES["no_rows"]], ids=str)
def test_no_uninitialised_memory_reaches_result_or_gradients(sizes):
    """Under this mode every fresh tensor holds NaN, so whatever is not written shows."""
    x, w, grad = operands(sizes, 3)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()  # the poison is on
        y = grouped_mm(x, w, ends(sizes))
        y.backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    for found in (y, x.grad, w.grad):
        assert found.isfinite().all()


@pytest.mark.parametrize("layout", ["expanded", "transposed", "strided"])
def test_a_gradient_in_any_memory_layout_is_taken(layout):
    sizes = SIZES["ragged"]
    x, w, grad = operands(sizes)
    if layout == "expanded":  # what sum() sends back
        grad = grad[:1, :1].expand_as(grad)
    elif layout == "transposed":
        grad = grad.t().contiguous().t()
    else:
        grad = torch.stack([grad, grad], dim=-1)[..., 0]
    assert not grad.is_contiguous()
    grouped_mm(x, w, ends(sizes)).backward(grad)
    _, grad_x, grad_w = loop(x, w, grad, sizes)
    torch.testing.assert_close(x.grad.double(), grad_x, atol=1e-5, rtol=0)
    torch.testing.assert_close(w.grad.double(), grad_w, atol=1e-5, rtol=0)


def test_operands_in_any_memory_layout_are_taken():
    sizes = SIZES["ragged"]
    x, w, grad = operands(sizes)
    y = grouped_mm(
        x.detach().t().contiguous().t(), w.detach().transpose(1, 2).contiguous().transpose(1, 2), ends(sizes)
    )
    torch.testing.assert_close(y.double(), loop(x, w, grad, sizes)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("wanted", ["x", "w"])
def test_only_the_wanted_gradient_is_made(wanted):
    sizes = SIZES["ragged"]
    x, w, grad = operands(sizes)
    (w if wanted == "x" else x).requires_grad_(False)
    grouped_mm(x, w, ends(sizes)).backward(grad)
    _, grad_x, grad_w = loop(x, w, grad, sizes)
    if wanted == "x":
        torch.testing.assert_close(x.grad.double(), grad_x, atol=1e-5, rtol=0)
        assert w.grad is None
    else:
        torch.testing.assert_close(w.grad.double(), grad_w, atol=1e-5, rtol=0)
        assert x.grad is None


@pytest.mark.parametrize("sizes", [SIZES["ragged"], SIZES["empty_experts"], SIZES["one_hot_expert"]], ids=str)
def test_gradients_pass_a_numerical_check(sizes):
    x, w, _ = operands(sizes, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w, ends(sizes)), (x, w))


def test_the_operator_keeps_the_contract_of_torch_library():
    """Schema, fake tensors, autograd registration and compilation, as torch itself checks them."""
    sizes = SIZES["empty_experts"]
    x, w, _ = operands(sizes)
    torch.library.opcheck(torch.ops.olmoe_lightning.grouped_mm.default, (x, w, ends(sizes)))


def test_misfits_are_refused_with_both_shapes():
    x, w, _ = operands(SIZES["ragged"])
    offsets = ends(SIZES["ragged"])
    with pytest.raises(ValueError, match=r"\[13, 5\] and \[4, 5, 6\]"):
        grouped_mm(x[:, :5], w, offsets)
    with pytest.raises(ValueError, match=r"\[6\] and \[4, 5, 6\]"):
        grouped_mm(x[0], w, offsets)
    with pytest.raises(ValueError, match=r"\[13, 6\] and \[5, 6\]"):
        grouped_mm(x, w[0], offsets)
    with pytest.raises(ValueError, match=r"shape \[4\].*got torch.int32 \[3\]"):
        grouped_mm(x, w, offsets[:3])
    with pytest.raises(ValueError, match=r"int32 offsets.*got torch.int64 \[4\]"):
        grouped_mm(x, w, offsets.long())
    with pytest.raises(ValueError, match=r"x torch.float32 and w torch.bfloat16"):
        grouped_mm(x, w.bfloat16(), offsets)
    with pytest.raises(ValueError, match=r"end at row 13, but there are 12 rows"):
        grouped_mm(x[:12], w, offsets)
