"""Triton's grouped product, interpreted: it equals a loop over the experts, and nothing leaks from padding rows."""

import math
import mmap

import pytest
import torch
from torch import Tensor

from olmoe_lightning.kernels import grouped_mm, reference_kernels
from olmoe_lightning.kernels.choice import interpreted_kernels
from olmoe_lightning.kernels.gpu import grouped_mm as gpu
from olmoe_lightning.kernels.gpu.grouped_mm import Tiling
from olmoe_lightning.kernels.grouped_mm import library_serves

SIZES = {
    "even": [16, 16],
    "ragged": [3, 1, 37, 18],
    "ends_between_blocks": [15, 17, 31, 1],
    "empty_experts": [0, 5, 0, 33, 0],
    "one_hot_expert": [0, 50, 0],
    "one_row": [0, 1, 0],
    "no_rows": [0, 0],
    "one_expert": [20],
}
WIDTHS = (37, 21)  # K and N, neither a multiple of a block
SMALL = Tiling(16, 16, 16, 4, 1)  # the smallest blocks that Triton multiplies: several of each expert here
UNRESERVED = 0x4000  # MAP_NORESERVE: Python 3.11 has no name for it

# fp32, fp64: sums of at most 136 products of numbers around 1, in any order. Halves: summed in fp32, and cut once, as
# Triton's interpreter does: an ulp at most.
TOLERANCE = {
    torch.float64: (1e-12, 0),
    torch.float32: (2e-5, 0),
    torch.bfloat16: (1e-4, 2**-7),
    torch.float16: (1e-4, 2**-10),
}


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def operands(
    sizes: list[int], tail: int = 0, dtype: torch.dtype = torch.float32, widths: tuple[int, int] = WIDTHS
) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, weights and a gradient of the result; the tail's rows hold NaN."""
    generator = torch.Generator().manual_seed(0)
    (k, n), rows = widths, sum(sizes) + tail
    shapes = ((rows, k), (len(sizes), n, k), (rows, n))
    x, w, grad = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    if tail:
        x[-tail:] = math.nan
        grad[-tail:] = math.nan
    return x, w, grad


def loop(x: Tensor, w: Tensor, grad: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Result and both gradients in fp64, expert by expert; zero for padding rows."""
    x, w, grad = x.double(), w.double(), grad.double()
    y, grad_x, grad_w = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for expert, size in enumerate(sizes):
        own = slice(start, start + size)
        y[own], grad_x[own] = x[own] @ w[expert].T, grad[own] @ w[expert]
        grad_w[expert] = grad[own].T @ x[own]
        start += size
    return y, grad_x, grad_w


def kernels(
    x: Tensor, w: Tensor, grad: Tensor, offsets: Tensor, cut: Tiling | None = SMALL
) -> tuple[Tensor, Tensor, Tensor]:
    y, grad_x = gpu.product(x, w.transpose(1, 2), offsets, cut), gpu.product(grad, w, offsets, cut)
    return y, grad_x, gpu.grad_w(grad, x, offsets, cut)


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    atol, rtol = TOLERANCE[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, atol=atol, rtol=rtol)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_result_and_gradients_equal_a_loop_and_the_tail_never_leaks(sizes):
    x, w, grad = operands(sizes, tail=21)
    check(kernels(x, w, grad, ends(sizes)), loop(x, w, grad, sizes), torch.float32)


@pytest.mark.parametrize("dtype, tail", [(torch.bfloat16, 3), (torch.float16, 0)], ids=str)
def test_halves_are_taken(dtype, tail):
    sizes = SIZES["ends_between_blocks"]
    x, w, grad = operands(sizes, tail, dtype)
    check(kernels(x, w, grad, ends(sizes)), loop(x, w, grad, sizes), dtype)


def test_no_rows_at_all_are_taken():
    x, w, grad = operands([0, 0])
    assert x.shape[0] == 0
    check(kernels(x, w, grad, ends([0, 0])), loop(x, w, grad, [0, 0]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_blocks_of_real_runs_give_the_same(dtype):
    sizes = [130, 0, 1]
    x, w, grad = operands(sizes, 3, dtype, (24, 66))
    check(kernels(x, w, grad, ends(sizes), cut=None), loop(x, w, grad, sizes), dtype)


def test_widths_that_blocks_divide_are_taken_without_masks_and_give_the_same():
    sizes = [3, 18]
    x, w, grad = operands(sizes, 5, widths=(32, 48))
    check(kernels(x, w, grad, ends(sizes)), loop(x, w, grad, sizes), torch.float32)


def test_widths_of_one_are_taken():
    x, w, grad = operands([3, 18], widths=(1, 1))
    check(kernels(x, w, grad, ends([3, 18])), loop(x, w, grad, [3, 18]), torch.float32)


def test_many_experts_each_find_their_rows():
    sizes = [(5 * expert) % 4 for expert in range(40)]
    x, w, grad = operands(sizes, 2, widths=(16, 16))
    y = gpu.product(x, w.mT, ends(sizes), SMALL)
    check((y,), loop(x, w, grad, sizes)[:1], torch.float32)


def test_rows_next_to_a_group_that_hold_nan_do_not_reach_it():
    """An expert whose rows all hold NaN: its own results are NaN, those of its neighbours are as ever."""
    sizes = [5, 3, 9]
    x, w, grad = operands(sizes)
    expected = loop(x, w, grad, sizes)
    x[5:8] = grad[5:8] = math.nan
    y, grad_x, grad_w = kernels(x, w, grad, ends(sizes))
    for found, wanted, poisoned in zip(
        (y, grad_x, grad_w), expected, (slice(5, 8), slice(5, 8), slice(1, 2)), strict=True
    ):
        assert found[poisoned].isnan().all()
        found[poisoned] = wanted[poisoned].float()
        torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=0)


def launch(x: Tensor, w: Tensor, y: Tensor, sizes: list[int], programs: int) -> None:
    """The first programs of a product of two experts, of widths 16, into memory of ours."""
    gpu._product_kernel[(programs,)](
        x, w, y, ends(sizes), len(x), 16, 16, 2, x.stride(0), 256, 1, 16, y.stride(0),
        GROUPS=4, BLOCK_R=16, BLOCK_N=16, BLOCK_K=16, EVEN_K=True,
    )  # fmt: skip


@pytest.mark.parametrize("programs, rows", [(1, 5), (2, 21), (3, 24), (4, 30)])
def test_a_program_writes_the_rows_of_its_group_and_no_others(programs, rows):
    """With all of them, the later would hide what the earlier wrote too much: the interpreter runs them in order."""
    x, w, grad = operands([5, 19], tail=6, widths=(16, 16))
    y = torch.full_like(grad, math.nan)
    launch(x, w, y, [5, 19], programs)
    assert y[rows:].isnan().all()
    torch.testing.assert_close(y[:rows].double(), loop(x, w, grad, [5, 19])[0][:rows], atol=2e-5, rtol=0)


def test_bf16_is_summed_in_fp32():
    """1 + 300 times 2^-9: in bf16 each of the small terms would be lost."""
    x = torch.full((1, 301), 2**-9, dtype=torch.bfloat16)
    x[0, 0] = 1
    w = torch.ones(1, 301, 1, dtype=torch.bfloat16)
    assert gpu.product(x, w, ends([1]), SMALL).item() == torch.tensor(1 + 300 * 2**-9).bfloat16().item() > 1.5


@pytest.mark.parametrize("layout", ["strided_rows", "transposed", "every_other", "expanded"])
def test_operands_in_any_memory_layout_are_taken(layout):
    sizes = [3, 18]
    x, w, grad = operands(sizes)
    expected = loop(x, w, grad, sizes)
    if layout == "strided_rows":
        x, w, grad = (
            torch.cat([each, torch.full_like(each, math.nan)], -1)[..., : each.shape[-1]] for each in (x, w, grad)
        )
    elif layout == "transposed":
        x, w, grad = (each.mT.contiguous().mT for each in (x, w, grad))
    elif layout == "every_other":
        x, w, grad = (torch.stack([each, each], -1)[..., 0] for each in (x, w, grad))
    else:
        grad = grad[:1, :1].expand_as(grad)  # what sum() sends back
        expected = loop(x, w, grad, sizes)
    assert not grad.is_contiguous()
    check(kernels(x, w, grad, ends(sizes)), expected, torch.float32)


def test_offsets_behind_the_last_row_count_as_the_end():
    sizes = [4, 20, 9]
    x, w, grad = operands([4, 20, 0])
    check(kernels(x, w, grad, ends(sizes)), loop(x, w, grad, [4, 20, 0]), torch.float32)


def test_rows_far_behind_two_to_the_31_numbers_are_found():
    """Memory that is never touched costs nothing: 4.3 GB of it here."""
    stride = 2**30 + 8
    memory = mmap.mmap(-1, 6 * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED)
    far = torch.frombuffer(memory, dtype=torch.bfloat16).view(3, stride)[:, :16]
    assert 2 * far.stride(0) > 2**31
    for sizes in ([2, 1], [3, 0]):  # the last row is a group's first, and not
        x, w, grad = operands(sizes, dtype=torch.bfloat16, widths=(16, 16))
        expected = loop(x, w, grad, sizes)
        far.copy_(x)
        check(kernels(far, w, grad, ends(sizes)), expected, torch.bfloat16)
        far.copy_(grad)
        check(kernels(x, w, far, ends(sizes)), expected, torch.bfloat16)
        launch(x, w, far, sizes, programs=4)
        check((far,), expected[:1], torch.bfloat16)
    # The weights of the last of three experts, and a column of weights far from the next.
    far.copy_(x)
    w_far = far.unsqueeze(-1)  # [E, K, N = 1]
    y = gpu.product(x, w_far, ends([0, 0, 3]), SMALL)
    torch.testing.assert_close(y.double(), x.double() @ x[2].double()[:, None], atol=1e-4, rtol=2**-7)
    y = gpu.product(x, far.t()[None], ends([3]), SMALL)
    torch.testing.assert_close(y.double(), x.double() @ x.double().T, atol=1e-4, rtol=2**-7)


def test_only_padding_rows_are_zeroed():
    y = torch.full((40, 30), math.nan)
    assert gpu.zero_tail_(y[:, :21], ends([2, 0, 9])) is not None
    expected = torch.full_like(y, math.nan)
    expected[11:, :21] = 0
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert gpu.zero_tail_(torch.ones(11, 3), ends([2, 0, 9])).all()  # no tail


def test_only_gradients_of_experts_without_rows_are_zeroed():
    grad_w = torch.full((5, 70, 61), math.nan)  # more than one program's share
    gpu.zero_empty_(grad_w, ends([0, 2, 0, 1, 0]))
    assert not grad_w[[0, 2, 4]].any()
    assert grad_w[[1, 3]].isnan().all()


def recorded(monkeypatch) -> list[str]:
    used = []
    for name in ("product", "grad_w"):
        kernel = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda *args, kernel=kernel, name=name: (used.append(name), kernel(*args))[1])
    return used


def test_the_function_of_the_package_takes_the_kernels_and_no_memory_stays_uninitialised(monkeypatch):
    used, sizes = recorded(monkeypatch), SIZES["empty_experts"]
    x, w, grad = operands(sizes, 3)
    expected = loop(x, w, grad, sizes)
    x.requires_grad_(), w.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()  # fresh memory is poisoned
        with interpreted_kernels():
            y = grouped_mm(x, w, ends(sizes))
            y.backward(grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sorted(used) == ["grad_w", "product", "product"]
    check((y.detach(), x.grad, w.grad), expected, torch.float32)


def test_cpu_tensors_references_and_other_dtypes_take_the_loop(monkeypatch):
    used, sizes = recorded(monkeypatch), SIZES["ragged"]
    x, w, _ = operands(sizes)
    grouped_mm(x, w, ends(sizes))
    with interpreted_kernels(), reference_kernels():
        grouped_mm(x, w, ends(sizes))
    assert not used
    with interpreted_kernels():
        grouped_mm(x, w, ends(sizes))
    assert used == ["product"]


class TestWhatTheLibraryServes:
    """The rule is about shapes, strides and addresses, so that CPU tensors tell it."""

    @staticmethod
    def matrices(k: int = 16, n: int = 24, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty(9, k, dtype=dtype), torch.empty(3, n, k, dtype=dtype), torch.empty(9, n, dtype=dtype)

    @staticmethod
    def served(x: Tensor, w: Tensor, grad: Tensor, capability: tuple[int, int] = (9, 0)) -> list[bool]:
        pairs = ((x, w.transpose(1, 2)), (grad, w), (grad, x))
        return [library_serves(capability, a, b, len(w)) for a, b in pairs]

    @pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
    def test_bf16_rows_of_16_bytes_on_hopper_and_blackwell(self, capability):
        assert self.served(*self.matrices(), capability) == [True] * 3

    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (11, 0), (12, 0)])
    def test_no_other_device(self, capability):
        assert self.served(*self.matrices(), capability) == [False] * 3

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    def test_no_other_dtype(self, dtype):
        assert self.served(*self.matrices(dtype=dtype)) == [False] * 3

    def test_no_widths_off_16_bytes(self):
        assert self.served(*self.matrices(k=12)) == [False] * 3
        assert self.served(*self.matrices(n=12)) == [False] * 3

    def test_strided_rows_but_no_dense_columns(self):
        x, w, grad = self.matrices()
        wide = torch.empty(9, 64, dtype=torch.bfloat16)
        assert self.served(wide[:, :16], w, wide[:, :24]) == [True] * 3
        assert self.served(wide[:, 8:24], w, grad) == [True] * 3  # begins at 16 bytes
        assert self.served(wide[:, 1:17], w, grad) == [False, True, False]  # does not
        assert self.served(torch.empty(9, 60, dtype=torch.bfloat16)[:, :16], w, grad) == [False, True, False]
        assert self.served(x.t().contiguous().t(), w, grad) == [False, True, False]
        assert self.served(x, w.mT.contiguous().mT, grad) == [True] * 3  # weights may be transposed
        assert self.served(x, torch.stack([w, w], -1)[..., 0], grad) == [False, False, True]
        assert self.served(x[:1].expand(9, 16), w, grad) == [False, True, False]

    def test_neither_nothing_nor_too_many_experts(self):
        x, w, grad = self.matrices()
        assert self.served(x[:0], w, grad[:0]) == [False] * 3
        assert self.served(x, w[:0], grad) == [False] * 3
        assert not library_serves((9, 0), x, w, 1024)
        assert library_serves((9, 0), x, w.mT, 1023)
