"""Triton: the grouped matrix product, while only the device knows how many rows each expert has.

The grid is sized for the worst case. Blocks of rows are numbered such that expert e's first one has the number
``start[e] // BLOCK_R + e``. This leaves every expert the blocks that it needs, as ``ceil(size / BLOCK_R) <=
end // BLOCK_R - start // BLOCK_R + 1``, and a program finds its expert by counting the first numbers that are not above
its own. A program without rows ends at once. The padding rows are one more expert's, whose sums have no terms.

R rows, E experts, N output width, K input width (of one product: for the gradient of x they change places).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmoe_lightning.kernels.gpu.compile_case import CompileCase
from olmoe_lightning.kernels.gpu.rows import side_by_side


class Tiling(NamedTuple):
    """How the result is cut into blocks, one for a program, and its sums into what is loaded at once."""

    height: int
    """Rows of a block."""
    width: int
    """Its columns."""
    depth: int
    """Terms of its sums that are loaded at once."""
    warps: int
    stages: int
    """How many such loads are under way."""


# Chosen by what the compiler makes of them: no register is spilled, and SM 8.6 and 8.9 have 99 KiB of shared memory.
_HIGH = Tiling(128, 128, 32, 4, 4)
_LOW = Tiling(64, 128, 32, 4, 4)
# From SM 9.0 to 11 the tensor cores read shared memory, of which there is 227 KiB, in blocks of at least 64 rows.
_HIGH_90 = Tiling(128, 256, 64, 8, 3)
_LOW_90 = Tiling(64, 128, 64, 4, 4)
_FP32 = Tiling(128, 64, 16, 4, 3)
_FP64 = Tiling(32, 32, 16, 4, 2)


def tiling(dtype: torch.dtype, capability: int, rows_per_expert: int) -> Tiling:
    """Blocks of the product and the gradient of x; of the gradient of w, too, with its N for ``rows_per_expert``.

    Args:
        dtype: of the operands.
        capability: ten times the device's compute capability, e.g. 86.
        rows_per_expert: the mean. High blocks of few rows would be work for nothing.
    """
    if dtype.itemsize > 2:
        return _FP32 if dtype == torch.float32 else _FP64
    low = rows_per_expert <= 64
    if 90 <= capability < 120:
        return _LOW_90 if low else _HIGH_90
    return _LOW if low else _HIGH


_INTERPRETED = tl.constexpr(not isinstance(tl.sum, triton.runtime.JITFunction))


@triton.jit
def _group_start(offsets, group, R):
    """The first row of a group; that of the group behind the last expert is the tail's."""
    return tl.minimum(tl.load(offsets + group - 1, mask=group > 0, other=0), R)


@triton.jit
def _add_product(a, b, acc):
    if _INTERPRETED:  # Triton's interpreter multiplies the bits of bf16 as if they were integers
        a = a.to(acc.dtype)
        b = b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit(do_not_specialize=["R"])
def _product_kernel(
    x, w, y, offsets, R, N, K, E, x_stride, w_stride_e, w_stride_k, w_stride_n, y_stride,
    GROUPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    blocks_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    # Programs that run at the same time share eight blocks of rows and, mostly, an expert: both stay in the cache.
    block, block_n = tl.swizzle2d(program // blocks_n, program % blocks_n, R // BLOCK_R + E + 1, blocks_n, 8)

    groups = tl.arange(0, GROUPS)
    starts = tl.load(offsets + groups - 1, mask=(groups > 0) & (groups <= E), other=0)
    firsts = tl.minimum(starts, R) // BLOCK_R + groups
    group = tl.sum(((firsts <= block) & (groups <= E)).to(tl.int32)) - 1
    start = _group_start(offsets, group, R)
    end = tl.minimum(tl.load(offsets + group, mask=group < E, other=R), R)
    row = start + (block - start // BLOCK_R - group) * BLOCK_R
    if row >= end:
        return

    rows = row + tl.arange(0, BLOCK_R)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    terms = tl.arange(0, BLOCK_K)
    in_columns = (columns < N)[None, :]
    # A row behind the group's end is computed from the last one and not stored.
    x_at = x + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * x_stride + terms[None, :]
    w_at = w + group.to(tl.int64) * w_stride_e
    w_at += columns.to(tl.int64)[None, :] * w_stride_n + terms.to(tl.int64)[:, None] * w_stride_k
    w_step = tl.cast(w_stride_k, tl.int64) * BLOCK_K
    ACC: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    acc = tl.zeros((BLOCK_R, BLOCK_N), ACC)
    for k in range(0, tl.where(group < E, K, 0), BLOCK_K):
        if EVEN_K:
            x_block = tl.load(x_at + k)
            w_block = tl.load(w_at, mask=in_columns, other=0.0)
        else:
            inside = k + terms < K
            x_block = tl.load(x_at + k, mask=inside[None, :], other=0.0)
            w_block = tl.load(w_at, mask=in_columns & inside[:, None], other=0.0)
        acc = _add_product(x_block, w_block, acc)
        w_at += w_step
    y_at = y + rows.to(tl.int64)[:, None] * y_stride + columns[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=(rows < end)[:, None] & in_columns)


@triton.jit(do_not_specialize=["R"])
def _grad_w_kernel(
    grad, x, grad_w, offsets, R, N, K, grad_stride, x_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    blocks_n = tl.cdiv(N, BLOCK_N)
    blocks_k = tl.cdiv(K, BLOCK_K)
    expert = tl.program_id(0) // (blocks_n * blocks_k)
    block = tl.program_id(0) % (blocks_n * blocks_k)
    block_n, block_k = tl.swizzle2d(block // blocks_k, block % blocks_k, blocks_n, blocks_k, 8)
    start = _group_start(offsets, expert, R)
    end = tl.minimum(tl.load(offsets + expert), R)

    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = block_k * BLOCK_K + tl.arange(0, BLOCK_K)
    lines = tl.arange(0, BLOCK_R)
    in_n = (n < N)[:, None]
    in_k = (k < K)[None, :]
    grad_at = lines.to(tl.int64)[None, :] * grad_stride + n[:, None]
    x_at = lines.to(tl.int64)[:, None] * x_stride + k[None, :]
    grad += start.to(tl.int64) * grad_stride
    x += start.to(tl.int64) * x_stride
    grad_step = tl.cast(grad_stride, tl.int64) * BLOCK_R
    x_step = tl.cast(x_stride, tl.int64) * BLOCK_R
    ACC: tl.constexpr = tl.float64 if grad_w.dtype.element_ty == tl.float64 else tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK_K), ACC)
    for row in range(start, end, BLOCK_R):
        inside = lines < end - row  # rows of the next expert and padding may hold NaN
        grad_block = tl.load(grad + grad_at, mask=in_n & inside[None, :], other=0.0)
        x_block = tl.load(x + x_at, mask=in_k & inside[:, None], other=0.0)
        acc = _add_product(grad_block, x_block, acc)
        grad += grad_step
        x += x_step
    out_at = grad_w + expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out_at, acc.to(grad_w.dtype.element_ty), mask=in_n & in_k)


@triton.jit(do_not_specialize=["R"])
def _zero_tail_kernel(y, offsets, R, N, E, y_stride, BLOCK_N: tl.constexpr):
    first = tl.load(offsets + E - 1) + tl.program_id(0)
    for row in range(first, R, tl.num_programs(0)):
        line = y + tl.cast(row, tl.int64) * y_stride
        for column in range(0, N, BLOCK_N):
            columns = column + tl.arange(0, BLOCK_N)
            tl.store(line + columns, tl.zeros((BLOCK_N,), y.dtype.element_ty), mask=columns < N)


@triton.jit
def _zero_empty_kernel(grad_w, offsets, size, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    if tl.load(offsets + expert) != tl.load(offsets + expert - 1, mask=expert > 0, other=0):
        return
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = grad_w + expert.to(tl.int64) * size + place
    tl.store(at, tl.zeros((BLOCK,), grad_w.dtype.element_ty), mask=place < size)


def product(x: Tensor, w_EKN: Tensor, offsets_E: Tensor, cut: Tiling | None = None) -> Tensor:
    """``y[r] = x[r] @ w[e]`` for the rows of each expert, and zero for padding rows.

    Args:
        x: [R, K], in fp32, fp64 or a half; halves are summed in fp32, and fp32 is not rounded to TF32.
        w_EKN: [E, K, N], same dtype, in memory as it is or transposed.
        offsets_E: int32 [E], ends of the experts' rows. What is above R counts as R.
        cut: blocks other than those of :func:`tiling`.

    Returns:
        [R, N].
    """
    if 1 not in w_EKN.stride()[1:]:
        w_EKN = w_EKN.contiguous()
    x, offsets_E = side_by_side(x), offsets_E.contiguous()
    (rows, inner), (experts, _, width) = x.shape, w_EKN.shape
    y = x.new_empty(rows, width)
    if y.numel():
        cut = cut or tiling(x.dtype, _capability(x.device), rows // max(experts, 1))
        blocks = (rows // cut.height + experts + 1) * triton.cdiv(width, cut.width)
        with torch.cuda.device_of(x):
            _product_kernel[(blocks,)](
                x, w_EKN, y, offsets_E, rows, width, inner, experts, x.stride(0), *w_EKN.stride(), y.stride(0),
                GROUPS=triton.next_power_of_2(experts + 1), BLOCK_R=cut.height, BLOCK_N=cut.width, BLOCK_K=cut.depth,
                EVEN_K=inner % cut.depth == 0, num_warps=cut.warps, num_stages=cut.stages,
            )  # fmt: skip
    return y


def grad_w(grad: Tensor, x: Tensor, offsets_E: Tensor, cut: Tiling | None = None) -> Tensor:
    """``grad_w[e]``, the sum of ``outer(grad[r], x[r])`` over the rows of expert e; zero without rows.

    Args:
        grad: [R, N].
        x: [R, K], same dtype, as in :func:`product`.
        offsets_E: int32 [E], ends of the experts' rows.
        cut: blocks other than those of :func:`tiling`.

    Returns:
        [E, N, K].
    """
    grad, x, offsets_E = side_by_side(grad), side_by_side(x), offsets_E.contiguous()
    (rows, width), inner, experts = grad.shape, x.shape[1], len(offsets_E)
    out = x.new_empty(experts, width, inner)
    if out.numel():
        cut = cut or tiling(x.dtype, _capability(x.device), width)
        blocks = experts * triton.cdiv(width, cut.height) * triton.cdiv(inner, cut.width)
        with torch.cuda.device_of(x):
            _grad_w_kernel[(blocks,)](
                grad, x, out, offsets_E, rows, width, inner, grad.stride(0), x.stride(0),
                BLOCK_N=cut.height, BLOCK_K=cut.width, BLOCK_R=cut.depth, num_warps=cut.warps, num_stages=cut.stages,
            )  # fmt: skip
    return out


def zero_tail_(y: Tensor, offsets_E: Tensor) -> Tensor:
    """Write zeros to the rows from ``offsets[-1]`` on, and touch no other; for products that leave them as they were.

    Args:
        y: [R, N], columns side by side.
        offsets_E: int32 [E] with E > 0, dense.
    """
    rows, width = y.shape
    if y.numel():
        with torch.cuda.device_of(y):
            _zero_tail_kernel[(min(rows, 1024),)](
                y, offsets_E, rows, width, len(offsets_E), y.stride(0), BLOCK_N=min(triton.next_power_of_2(width), 1024)
            )
    return y


def zero_empty_(grad_w: Tensor, offsets_E: Tensor) -> Tensor:
    """Write zeros to the gradients of experts without rows, and touch no other.

    Args:
        grad_w: [E, N, K], dense.
        offsets_E: int32 [E], dense.
    """
    size = grad_w[0].numel()
    with torch.cuda.device_of(grad_w):
        _zero_empty_kernel[(len(grad_w), triton.cdiv(size, 4096))](grad_w, offsets_E, size, BLOCK=4096)
    return grad_w


def _capability(device: torch.device) -> int:
    """Ten times the compute capability; elsewhere that of small blocks."""
    if device.type != "cuda" or torch.version.hip:
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _compile_case(
    name: str, kernel: Any, dtype: str, cut: Tiling, architectures: tuple[int, ...], **constants: int
) -> CompileCase:
    """As a real run has it: dense matrices of widths that are multiples of 16, any number of rows and experts."""
    types = {"offsets": "*i32", **dict.fromkeys(("x", "w", "y", "grad", "grad_w"), f"*{dtype}")}
    return CompileCase(
        f"{name} {dtype}", kernel, types, constants, ("R", "E"), cut.warps, cut.stages,
        tensor_core=cut.depth > 1 and dtype == "bf16", architectures=architectures,
    )  # fmt: skip


def _compile_cases() -> list[CompileCase]:
    every, plain = (80, 90, 100), Tiling(1, 1024, 1, 4, 1)
    found = [
        _compile_case("zero_tail", _zero_tail_kernel, "bf16", plain, every, BLOCK_N=1024),
        _compile_case("zero_empty", _zero_empty_kernel, "bf16", plain, every, BLOCK=4096),
    ]
    for dtype, cut, architectures in (
        ("bf16", _HIGH, (80,)),
        ("bf16", _LOW, (80,)),
        ("bf16", _HIGH_90, (90, 100)),
        ("bf16", _LOW_90, (90, 100)),
        ("fp32", _FP32, every),
    ):
        size = f"{cut.height}x{cut.width}x{cut.depth}"
        blocks = {"GROUPS": 128, "BLOCK_R": cut.height, "BLOCK_N": cut.width, "BLOCK_K": cut.depth, "EVEN_K": 1}
        sums = {"BLOCK_N": cut.height, "BLOCK_K": cut.width, "BLOCK_R": cut.depth}
        for what, kernel, constants in (
            ("grouped_mm", _product_kernel, {"w_stride_k": 1, **blocks}),
            ("grouped_mm_grad_x", _product_kernel, {"w_stride_n": 1, **blocks}),
            ("grouped_mm_grad_w", _grad_w_kernel, sums),
        ):
            found.append(_compile_case(f"{what} {size}", kernel, dtype, cut, architectures, **constants))
    return found


COMPILE_CASES = _compile_cases()
