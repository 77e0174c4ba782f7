"""Triton's permutation within one process, interpreted: rows sorted by expert and their way back."""

import math
import mmap

import pytest
import torch

from olmoe_lightning.kernels import combine_rows, dispatch_rows, permute, plan_permutation
from olmoe_lightning.kernels.choice import interpreted_kernels
from olmoe_lightning.kernels.gpu import permute as gpu

EXPERTS = 4
UNRESERVED = 0x4000  # MAP_NORESERVE: Python 3.11 has no name for it
ROUTES = {
    "spread": [[0, 2], [3, 0], [2, 1], [1, 3], [0, 1]],
    "empty_experts": [[3, 1], [1, 3]],
    "one_choice": [[1], [0], [1], [1]],
    "one_token": [[3, 0, 1]],
    "ragged": [[2, 1]] * 9 + [[2, 0]],
    "no_tokens": torch.empty(0, 2, dtype=torch.int64),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def stored(wide, dtype):
    """As Triton's interpreter stores sums: it cuts fp32 to bf16, where GPUs round to the nearest."""
    if dtype != torch.bfloat16:
        return wide.to(dtype)
    return (wide.view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


@pytest.fixture(params=ROUTES.values(), ids=ROUTES.keys())
def ids(request):
    return torch.as_tensor(request.param)


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("more", [0, 140])
def test_the_plan_is_the_reference_bit_for_bit(ids, more):
    ids = torch.cat(
        [ids, ids[:1].expand(more if len(ids) else 0, -1)]
    )  # beyond a block of routes, nearly all of them alike
    found, wanted = gpu.plan_permutation(ids, EXPERTS), plan_permutation(ids, EXPERTS)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [1, 7, 2050])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_gathered(ids, dtype, width):
    token = plan_permutation(ids, EXPERTS).token_of_row_R
    x = numbers(len(ids), width, dtype=dtype)
    assert torch.equal(gpu.gather_rows(x, token), x[token])


@pytest.mark.parametrize("width", [1, 7, 2050])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_summed_in_the_order_of_the_experts_and_rounded_once(ids, dtype, width):
    row = plan_permutation(ids, EXPERTS).row_of_route_TK
    rows = numbers(row.numel(), width, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    wanted = torch.zeros(len(ids), width, dtype=wide)
    for k in range(ids.shape[1]):
        wanted += rows[row[:, k]].to(wide)
    found = gpu.gather_sum(rows, row)
    assert torch.equal(found, stored(wanted, dtype))
    # Three numbers at most, perhaps in another order; bf16 is rounded, or cut, once.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(permute._gather_sum(rows, row), found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_half_precision_is_not_rounded_between_the_rows(dtype, large):
    rows = torch.tensor([[large], [1], [1]]).to(dtype)
    assert gpu.gather_sum(rows, torch.tensor([[0, 1, 2]])).item() == large + 2
    assert ((rows[0] + rows[1]) + rows[2]).item() == large


def test_rows_of_minus_one_are_left_out_and_what_is_not_named_is_not_read():
    rows = numbers(4, 5)
    rows[3] = math.nan
    found = gpu.gather_sum(rows, torch.tensor([[0, -1], [-1, -1], [2, 1]]))
    assert torch.equal(found, torch.stack([rows[0], torch.zeros(5), rows[2] + rows[1]]))
    assert gpu.gather_sum(rows, torch.tensor([[3, 0]])).isnan().all()  # what is named is read
    found = gpu.gather_rows(rows, torch.tensor([-1, 2]))
    assert torch.equal(found, torch.stack([torch.zeros(5), rows[2]]))


@pytest.mark.parametrize(
    "spread",
    [lambda x: x.t().contiguous().t(), lambda x: torch.cat([x, x], 1)[:, : x.shape[1]], lambda x: x.expand(3, -1)],
)
def test_any_memory_layout_is_taken(spread):
    x = spread(numbers(1 if "expand" in spread.__code__.co_names else 3, 6))
    row = torch.tensor([[0, 9], [2, 9], [1, 9]])[:, :1]  # neither are the numbers contiguous
    assert torch.equal(gpu.gather_rows(x, row[:, 0]), x[row[:, 0]])
    assert torch.equal(gpu.gather_sum(x, row), x[row[:, 0]])


def test_rows_far_behind_two_to_the_31_numbers_are_found():
    """Memory that is never touched costs nothing: 4.3 GB of it here."""
    stride = 2**30 + 8
    memory = mmap.mmap(-1, 6 * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED)
    rows = torch.frombuffer(memory, dtype=torch.bfloat16).view(3, stride)[:, :8]
    assert 2 * rows.stride(0) > 2**31
    rows[2] = numbers(8)
    assert torch.equal(gpu.gather_rows(rows, torch.tensor([2, 0])), rows[[2, 0]])
    assert torch.equal(gpu.gather_sum(rows, torch.tensor([[2, 0]])), rows[2:])


def whole_numbers(*shape, seed=0):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dispatch_and_combine_are_the_reference_forward_and_backward(ids, dtype, monkeypatch):
    used = []
    for name in ("plan_permutation", "gather_rows", "gather_sum"):
        kernel = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda *args, kernel=kernel, name=name: (used.append(name), kernel(*args))[1])

    def travel():
        plan = plan_permutation(ids, EXPERTS)
        x = whole_numbers(len(ids), 6).to(dtype).requires_grad_()
        rows = dispatch_rows(x, plan)
        y = combine_rows(rows * 2, plan)
        y.backward(whole_numbers(6, len(ids), seed=1).to(dtype).t())
        return rows.detach(), y.detach(), x.grad

    wanted = travel()
    assert not used
    with interpreted_kernels():
        found = travel()
    assert sorted(used) == ["gather_rows"] * 2 + ["gather_sum"] * 2 + ["plan_permutation"]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)  # small whole numbers: all sums are exact
