"""RMSNorm and the preparation of queries, keys and values: compiled kernels, references and definitions agree."""

import pytest
import torch
from torch import Tensor

from olmoe_lightning.kernels import HeadLayout, prepare_qkv, rms_norm
from olmoe_lightning.kernels.norm import rms_norm_reference

pytestmark = pytest.mark.usefixtures("kernels")

# fp32 sums of at most some hundred terms of order one, against fp64.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def rms_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def gradients(y: Tensor | tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a fixed random functional of the outputs."""
    generator = torch.Generator().manual_seed(3)
    outputs = y if isinstance(y, tuple) else (y,)
    total = sum((out * torch.randn(out.shape, generator=generator).to(out.dtype)).sum() for out in outputs)
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (2, 3, 7), (3, 130), (0, 4)], ids=str)
def test_rms_norm_and_its_gradients_equal_the_definition(shape, eps):
    torch.manual_seed(0)
    x = (2 * torch.randn(shape)).requires_grad_()
    weight = torch.rand(shape[-1]).add(0.5).requires_grad_()
    y = rms_norm(x, weight, eps)
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    expected = rms_definition(*wide, eps)
    torch.testing.assert_close(y.double(), expected, **CLOSE)
    for found, reference in zip(gradients(y, [x, weight]), gradients(expected, wide), strict=True):
        torch.testing.assert_close(found.double(), reference, **CLOSE)


def test_rms_norm_of_zeros_is_zero_with_a_finite_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    y = rms_norm(x, torch.ones(4), 1e-5)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert x.grad.isfinite().all()


def test_rms_norm_shows_nan_in_its_row_alone():
    x = torch.ones(3, 4)
    x[1, 2] = float("nan")
    y = rms_norm(x, torch.ones(4), 1e-5)
    assert y.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_of_16_bit_values_rounds_the_normalised_value_and_then_the_product(dtype):
    x, weight = torch.randn(3, 8).to(dtype), torch.rand(8).to(dtype)
    expected = rms_definition(x.float(), torch.ones(8), 1e-5).to(dtype) * weight
    y = rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected, atol=0, rtol=2**-7)  # at most one rounding apart


@pytest.mark.parametrize("layout", ["strided_x", "expanded_grad", "strided_weight"])
def test_rms_norm_takes_any_memory_layout(layout):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 5), torch.rand(5)
    grad = torch.randn(6, 5)
    reference_x, reference_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    if layout == "strided_x":
        x = x.t().contiguous().t()
    elif layout == "expanded_grad":
        grad = grad[:1, :1].expand_as(grad)
    else:
        weight = torch.stack([weight, weight + 9], dim=1)[:, 0]
    x, weight = x.requires_grad_(), weight.requires_grad_()
    rms_norm(x, weight, 1e-5).backward(grad)
    rms_norm_reference(reference_x, reference_weight, 1e-5).backward(grad)
    torch.testing.assert_close(x.grad, reference_x.grad, **CLOSE)
    torch.testing.assert_close(weight.grad, reference_weight.grad, **CLOSE)


# -------------------------------------------------------------------------------------------------------- prepare_qkv

BATCH, SEQ = 2, 5


def definition(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, angles: Tensor, layout: HeadLayout
) -> tuple[Tensor, ...]:
    """With positions as complex numbers."""
    heads, kv_heads, width = layout.num_heads, layout.num_kv_heads, layout.head_dim
    parts = qkv.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
    out = []
    for part, weight, count in zip(parts, (q_weight, k_weight, None), (heads, kv_heads, kv_heads), strict=True):
        if weight is not None and layout.flat_norm:
            part = rms_definition(part, weight, layout.eps)
        part = part.unflatten(-1, (count, width))
        if weight is not None and not layout.flat_norm:
            part = rms_definition(part, weight, layout.eps)
        if layout.clip is not None:
            part = part.clamp(-layout.clip, layout.clip)
        out.append(part)
    turn = torch.polar(torch.ones_like(angles), angles)
    for index in (0, 1):
        first, second = out[index].chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        out[index] = torch.cat([turned.real, turned.imag], dim=-1)
    return tuple(out)


@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize("norm", ["none", "flat", "head"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("rows_of_angles", [1, BATCH])
def test_queries_keys_and_values_and_their_gradients_equal_the_definition(heads, kv_heads, norm, clip, rows_of_angles):
    torch.manual_seed(0)
    layout = HeadLayout(heads, kv_heads, 6, norm == "flat", 1e-3, clip)
    qkv = torch.randn(BATCH, SEQ, (heads + 2 * kv_heads) * 6).requires_grad_()
    weights = [torch.rand(layout.norm_width(count)).add(0.5).requires_grad_() for count in (heads, kv_heads)]
    if norm == "none":
        weights = []
    angles = torch.randn(rows_of_angles, SEQ, 1, 3, dtype=torch.float64) * 3
    q_weight, k_weight = weights or (None, None)
    found = prepare_qkv(qkv, q_weight, k_weight, angles.cos().float(), angles.sin().float(), layout)
    wide = [leaf.detach().double().requires_grad_() for leaf in (qkv, *weights)]
    expected = definition(wide[0], *(wide[1:] or (None, None)), angles, layout)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, **CLOSE)
    for ours, reference in zip(gradients(found, [qkv, *weights]), gradients(expected, wide), strict=True):
        torch.testing.assert_close(ours.double(), reference, **CLOSE)


def test_norm_widths_are_a_head_or_all_heads():
    assert HeadLayout(4, 2, 6, True, 1e-5).norm_width(4) == 24
    assert HeadLayout(4, 2, 6, False, 1e-5).norm_width(4) == 6
