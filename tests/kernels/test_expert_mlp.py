"""The experts' two products around SwiGLU against a loop over rows, over sizes around the kernel's blocks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmoe_lightning.kernels import expert_mlp

pytestmark = pytest.mark.usefixtures("kernels")

SIZES = {
    "even": [4, 4, 4],
    "ragged": [3, 1, 9],
    "empty_experts": [0, 5, 0, 3, 0],
    "one_hot_expert": [0, 12, 0],
    "no_rows": [0, 0],
    "several_blocks": [600, 512, 3],
}
WIDTH, HIDDEN = 5, 6
CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # fp32 against fp64; weight gradients of 600 rows are sums of order 100


def operands(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rows, w_gate_up, w_down, row weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(sizes), WIDTH), (len(sizes), 2 * HIDDEN, WIDTH), (len(sizes), WIDTH, HIDDEN), (sum(sizes),)]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [value.to(dtype).requires_grad_() for value in values]


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def definition(rows: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    out = []
    for expert, piece in enumerate(rows.split(sizes)):
        gate, up = (piece @ w_gate_up[expert].T).chunk(2, dim=-1)
        out.append((F.silu(gate) * up) @ w_down[expert].T)
    return torch.cat(out) * weights[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_result_and_all_gradients_equal_a_loop_over_experts(sizes, dtype):
    leaves = operands(sizes, dtype)
    y = expert_mlp(*leaves, ends(sizes))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = definition(*wide, sizes)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, **CLOSE)
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, reference = torch.autograd.grad(y, leaves, pull.to(dtype)), torch.autograd.grad(expected, wide, pull)
    for ours, theirs in zip(found, reference, strict=True):
        scale = max(1.0, theirs.abs().max().item() if theirs.numel() else 1.0)
        torch.testing.assert_close(ours.double() / scale, theirs / scale, **CLOSE)


def test_gradients_of_experts_without_rows_are_zeros():
    """In fresh memory that holds NaN."""
    sizes = [0, 3, 0, 2]
    leaves = operands(sizes)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()  # the poison is on
        grads = torch.autograd.grad(expert_mlp(*leaves, ends(sizes)).sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    for grad in grads:
        assert grad.isfinite().all()
    for grad in grads[1:3]:
        assert torch.equal(grad[[0, 2]], torch.zeros_like(grad[[0, 2]]))
        assert grad[1].any()
        assert grad[3].any()


def test_padding_rows_give_zero_and_get_no_gradient():
    sizes = [2, 0, 3]
    clean = operands(sizes)
    dirty = [clean[0].detach(), clean[1], clean[2], clean[3].detach()]
    dirty[0] = torch.cat([dirty[0], torch.full((2, WIDTH), math.nan)]).requires_grad_()
    dirty[3] = torch.cat([dirty[3], torch.full((2,), math.nan)]).requires_grad_()
    y = expert_mlp(*dirty, ends(sizes))
    assert torch.equal(y[5:], torch.zeros_like(y[5:]))
    expected = expert_mlp(*clean, ends(sizes))
    torch.testing.assert_close(y[:5], expected, **CLOSE)
    found = torch.autograd.grad(y[:5].square().sum(), dirty)
    reference = torch.autograd.grad(expected.square().sum(), clean)
    torch.testing.assert_close(found[0][:5], reference[0], **CLOSE)
    torch.testing.assert_close(found[3][:5], reference[3], **CLOSE)
    assert torch.equal(found[0][5:], torch.zeros_like(found[0][5:]))
    for ours, theirs in zip(found[1:3], reference[1:3], strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_any_memory_layout_is_taken():
    sizes = SIZES["ragged"]
    leaves = [leaf.detach() for leaf in operands(sizes)]
    expected = expert_mlp(*leaves, ends(sizes))
    strided = [
        leaves[0].t().contiguous().t(),
        leaves[1].transpose(1, 2).contiguous().transpose(1, 2),
        leaves[2].transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([leaves[3], leaves[3]], dim=1)[:, 0],
    ]
    strided = [value.requires_grad_() for value in strided]
    y = expert_mlp(*strided, ends(sizes))
    torch.testing.assert_close(y, expected, **CLOSE)
    grad = torch.ones(1, 1).expand_as(y)
    dense = [leaf.clone().requires_grad_() for leaf in leaves]
    reference = torch.autograd.grad(expert_mlp(*dense, ends(sizes)), dense, grad.contiguous())
    for ours, theirs in zip(torch.autograd.grad(y, strided, grad), reference, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_nan_stays_in_its_row_forward():
    sizes = [2, 3]
    leaves = [leaf.detach() for leaf in operands(sizes)]
    leaves[0][3] = math.nan
    y = expert_mlp(*leaves, ends(sizes))
    assert y.isnan().all(-1).tolist() == [False, False, False, True, False]
    assert y[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("operand", range(4))
def test_misfits_are_refused_before_memory_is_touched(operand):
    sizes = SIZES["ragged"]
    leaves = [leaf.detach() for leaf in operands(sizes)]
    offsets = ends(sizes)
    leaves[operand] = torch.cat([leaves[operand]] * 2, dim=-1)
    with pytest.raises(ValueError, match="expert_mlp with w_down"):
        expert_mlp(*leaves, offsets)


def test_offsets_of_another_kind_or_number_are_refused():
    sizes = SIZES["ragged"]
    leaves = [leaf.detach() for leaf in operands(sizes)]
    with pytest.raises(ValueError, match=r"int32 offsets.*torch.int64"):
        expert_mlp(*leaves, ends(sizes).long())
    with pytest.raises(ValueError, match=r"\[3\]\), got .*\[2\]\)"):
        expert_mlp(*leaves, ends(sizes)[:2])
    with pytest.raises(ValueError, match="end at row 13, but there are 12 rows"):
        expert_mlp(leaves[0][:12], leaves[1], leaves[2], leaves[3][:12], ends(sizes))
