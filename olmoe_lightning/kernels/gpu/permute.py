"""Triton: tokens to expert-major rows within one process, and the sum of each token's rows. Gathers only, no atomics.

T tokens, K chosen experts, R rows, E experts, D model width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmoe_lightning.kernels.gpu.compile_case import CompileCase
from olmoe_lightning.kernels.gpu.routes import sort_routes
from olmoe_lightning.kernels.gpu.rows import cut, side_by_side
from olmoe_lightning.kernels.routes import Permutation


@triton.jit
def _gather_kernel(x, token, out, D, x_stride, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.load(token + row)
    values = tl.load(x + t * x_stride + columns, mask=columns < tl.where(t >= 0, D, 0), other=0.0)
    tl.store(out + row * D + columns, values, mask=columns < D)


@triton.jit
def _gather_sum_kernel(rows, row, out, D, rows_stride, K: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ACC: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK_D,), ACC)
    for k in tl.static_range(K):
        r = tl.load(row + token * K + k)
        values = tl.load(rows + r * rows_stride + columns, mask=columns < tl.where(r >= 0, D, 0), other=0.0)
        total += values.to(ACC)
    tl.store(out + token * D + columns, total.to(out.dtype.element_ty), mask=columns < D)


def plan_permutation(expert_ids_TK: Tensor, num_experts: int) -> Permutation:
    """As ``kernels.plan_permutation``; nothing is sorted, as the row of each route can be counted."""
    row, ends = sort_routes(expert_ids_TK, num_experts)
    row_of_route = row.to(torch.int64)
    routes = torch.arange(row.numel(), device=row.device)
    route_of_row = torch.empty_like(routes).scatter_(0, row_of_route.view(-1), routes)
    token_of_row = torch.div(route_of_row, expert_ids_TK.shape[1], rounding_mode="floor")
    return Permutation(token_of_row, route_of_row, row_of_route, ends.to(torch.int32))


def gather_rows(x_TD: Tensor, token_of_row_R: Tensor) -> Tensor:
    """Row r is token ``token_of_row[r]``, or zero where that is -1.

    Args:
        x_TD: [T, D].
        token_of_row_R: int64 [R].

    Returns:
        [R, D].
    """
    x_TD, width = side_by_side(x_TD), x_TD.shape[1]
    out = torch.empty(len(token_of_row_R), width, dtype=x_TD.dtype, device=x_TD.device)
    if out.numel():
        block, warps = cut(width)
        _gather_kernel[(len(out), triton.cdiv(width, block))](
            x_TD, token_of_row_R.contiguous(), out, width, x_TD.stride(0), BLOCK_D=block, num_warps=warps
        )
    return out


def gather_sum(rows_RD: Tensor, row_of_route_TK: Tensor) -> Tensor:
    """The sum of each token's rows, in the order of its experts, rounded once. A row of -1 is left out.

    Args:
        rows_RD: [R, D].
        row_of_route_TK: int64 [T, K].

    Returns:
        [T, D].
    """
    rows_RD, (tokens, k), width = side_by_side(rows_RD), row_of_route_TK.shape, rows_RD.shape[1]
    out = torch.empty(tokens, width, dtype=rows_RD.dtype, device=rows_RD.device)
    if out.numel():
        block, warps = cut(width)
        _gather_sum_kernel[(tokens, triton.cdiv(width, block))](
            rows_RD, row_of_route_TK.contiguous(), out, width, rows_RD.stride(0), K=k, BLOCK_D=block, num_warps=warps
        )
    return out


def _compile_cases(dtype: str, k: int) -> list[CompileCase]:
    block, warps = cut(2048)
    rows = f"*{dtype}"
    return [
        CompileCase(
            f"permute {dtype} D2048",
            _gather_kernel,
            {"x": rows, "token": "*i64", "out": rows},
            {"BLOCK_D": block},
            num_warps=warps,
        ),
        CompileCase(
            f"unpermute {dtype} K{k} D2048",
            _gather_sum_kernel,
            {"rows": rows, "row": "*i64", "out": rows},
            {"K": k, "BLOCK_D": block},
            num_warps=warps,
        ),
    ]


COMPILE_CASES = [*_compile_cases("bf16", 8), *_compile_cases("fp32", 4)]
