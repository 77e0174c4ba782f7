"""Triton: routed rows in the memory of peers, written and read through their addresses.

Each peer's memory is described by its address and by the distance of its rows, two numbers of a table on the device. A
program serves one token, or one row, and a piece of its columns. The semantics are those of ``kernels/rowwise.py``.

T tokens, K chosen experts, E_local experts of each process, N processes, D model width, C rows that fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmoe_lightning.kernels.gpu.compile_case import CompileCase
from olmoe_lightning.kernels.gpu.routes import count_routes, place_routes
from olmoe_lightning.kernels.routes import Routes, Window

__all__ = ["count_routes", "gather_weights", "place_routes", "publish_rows", "put_rows", "sum_rows"]

_PUBLISHERS = 1024
"""Programs that publish rows; the host does not know how many rows there are."""


@triton.jit
def _row_of_peer(peers, rank, row, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a row begins; the table has address and stride of each peer."""
    here = row >= 0
    address = tl.load(peers + 2 * rank, mask=here, other=0)
    stride = tl.load(peers + 2 * rank + 1, mask=here, other=0)
    place = address.to(tl.pointer_type(ELEMENT)) + row.to(tl.int64) * stride
    # The compiler cannot see through an address that it loads. Aligned rows are moved 16 bytes at a time.
    return tl.multiple_of(place, 16) if ALIGNED else place


@triton.jit
def _put_kernel(
    x,
    weights,
    rank,
    row,
    peers,
    weight_peers,
    D,
    x_stride,
    HAS_WEIGHTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    values = tl.load(x + token * x_stride + columns, mask=columns < D)
    for k in tl.static_range(K):
        route = token * K + k
        r = tl.load(row + route)
        n = tl.load(rank + route)
        place = _row_of_peer(peers, n, r, x.dtype.element_ty, ALIGNED)
        tl.store(place + columns, values, mask=columns < tl.where(r >= 0, D, 0))
        if HAS_WEIGHTS:
            beside = _row_of_peer(weight_peers, n, r, tl.float32, False)
            tl.store(beside, tl.load(weights + route), mask=(r >= 0) & (tl.program_id(1) == 0))


@triton.jit
def _sum_kernel(
    peers,
    rank,
    row,
    weights,
    out,
    D,
    HAS_WEIGHTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ACC: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK_D,), ACC)
    for k in tl.static_range(K):
        route = token * K + k
        r = tl.load(row + route)
        place = _row_of_peer(peers, tl.load(rank + route), r, out.dtype.element_ty, ALIGNED)
        values = tl.load(place + columns, mask=columns < tl.where(r >= 0, D, 0), other=0.0).to(ACC)
        if HAS_WEIGHTS:
            values *= tl.load(weights + route, mask=r >= 0, other=0.0).to(ACC)
        total += values
    tl.store(out + token * D + columns, total.to(out.dtype.element_ty), mask=columns < D)


@triton.jit(do_not_specialize=["R"])
def _gather_kernel(peers, rank, row, out, R, BLOCK: tl.constexpr):
    routes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(row + routes, mask=routes < R, other=-1)
    n = tl.load(rank + routes, mask=routes < R, other=0)
    values = tl.load(_row_of_peer(peers, n, r, out.dtype.element_ty, False), mask=r >= 0, other=0.0)
    tl.store(out + routes, values, mask=routes < R)


@triton.jit
def _publish_kernel(
    rows,
    to,
    received,
    ends,
    own,
    N,
    E_local,
    D,
    rows_stride,
    to_stride,
    EXPERTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``ends``: of the rows of (expert, source), in the order in which they stand."""
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    experts = tl.arange(0, EXPERTS)
    end = tl.load(ends + experts * N + own, mask=experts < E_local, other=0)
    start = end - tl.load(received + own * E_local + experts, mask=experts < E_local, other=0)
    for row in range(tl.program_id(0), tl.load(ends + N * E_local - 1), tl.num_programs(0)):
        stays = tl.sum(((row >= start) & (row < end)).to(tl.int32))
        at = tl.cast(row, tl.int64)
        mask = columns < tl.where(stays == 0, D, 0)
        values = tl.load(rows + at * rows_stride + columns, mask=mask)
        tl.store(to + at * to_stride + columns, values, mask=mask)


def put_rows(x_TD: Tensor, weights_TK: Tensor | None, routes: Routes, windows: Sequence[Window]) -> None:
    """As ``kernels.rowwise.put_rows``.

    Raises:
        ValueError: windows have another dtype than the tokens, or rows whose values are not consecutive in memory.
    """
    x_TD = side_by_side(x_TD)
    rows = [window.rows for window in windows]
    if any(each.dtype != x_TD.dtype or (each.shape[1] > 1 and each.stride(1) != 1) for each in rows):
        found = [(each.dtype, each.stride()) for each in rows]
        raise ValueError(f"put_rows needs windows with dense rows of {x_TD.dtype}, got (dtype, strides) {found}")
    rank, row = _dense(routes)
    (tokens, k), width = row.shape, x_TD.shape[1]
    if not tokens * k * width:
        return
    has_weights = weights_TK is not None
    weights = weights_TK.contiguous() if weights_TK is not None else x_TD
    tables = _table([*rows, *(window.weights for window in windows)])
    block, warps = cut(width)
    _put_kernel[(tokens, triton.cdiv(width, block))](
        x_TD, weights, rank, row, tables, tables[len(rows) :], width, x_TD.stride(0),
        HAS_WEIGHTS=has_weights, K=k, BLOCK_D=block, ALIGNED=_aligned(rows), num_warps=warps,
    )  # fmt: skip


def publish_rows(rows_CD: Tensor, weights_C: Tensor | None, received_NL: Tensor, rank: int, window: Window) -> Tensor:
    """As ``kernels.rowwise.publish_rows``: what this process sent to itself stays where it is."""
    rows_CD = side_by_side(rows_CD)
    if weights_C is not None:
        window.weights[: len(weights_C)].copy_(weights_C)
    (size, local), (capacity, width) = received_NL.shape, rows_CD.shape
    if capacity * width * size * local:
        received = received_NL.contiguous()
        ends = received.t().reshape(-1).cumsum(0, dtype=torch.int32)
        block, warps = cut(width)
        _publish_kernel[(min(capacity, _PUBLISHERS), triton.cdiv(width, block))](
            rows_CD, window.rows, received, ends, rank, size, local, width, rows_CD.stride(0), window.rows.stride(0),
            EXPERTS=triton.next_power_of_2(local), BLOCK_D=block, num_warps=warps,
        )  # fmt: skip
    return rows_CD


def sum_rows(rows: Sequence[Tensor], routes: Routes, weights_TK: Tensor | None = None) -> Tensor:
    """As ``kernels.rowwise.sum_rows``."""
    rows = [side_by_side(each) for each in rows]
    rank, row = _dense(routes)
    (tokens, k), width = row.shape, rows[0].shape[1]
    out = torch.empty(tokens, width, dtype=rows[0].dtype, device=row.device)
    if out.numel():
        block, warps = cut(width)
        _sum_kernel[(tokens, triton.cdiv(width, block))](
            _table(rows), rank, row, row if weights_TK is None else weights_TK.contiguous(), out, width,
            HAS_WEIGHTS=weights_TK is not None, K=k, BLOCK_D=block, ALIGNED=_aligned(rows), num_warps=warps,
        )  # fmt: skip
    return out


def gather_weights(weights: Sequence[Tensor], routes: Routes) -> Tensor:
    """As ``kernels.rowwise.gather_weights``."""
    rank, row = _dense(routes)
    out = torch.empty(row.shape, dtype=weights[0].dtype, device=row.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), 256),)
        _gather_kernel[grid](_table(weights), rank, row, out, out.numel(), BLOCK=256)
    return out


def cut(width: int) -> tuple[int, int]:
    """Columns of a piece, and warps for it: up to 16 values of a thread, so that 16 bytes are moved at once."""
    block = min(triton.next_power_of_2(width), 2048)
    return block, max(1, min(4, block // 256))


def side_by_side(rows: Tensor) -> Tensor:
    """Rows whose values are consecutive in memory, wherever each row begins; a copy when they are not."""
    return rows if rows.shape[1] <= 1 or rows.stride(1) == 1 else rows.contiguous()


def _dense(routes: Routes) -> tuple[Tensor, Tensor]:
    return routes.rank_TK.contiguous(), routes.row_TK.contiguous()


def _aligned(rows: Sequence[Tensor]) -> bool:
    return all(each.data_ptr() % 16 == 0 and each.stride(0) * each.itemsize % 16 == 0 for each in rows)


def _table(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses and strides, int64 [N, 2], on the device.

    From pinned memory, so that the host does not wait for the copy; its allocator knows when the copy is over.
    """
    numbers = torch.tensor([(each.data_ptr(), each.stride(0)) for each in tensors], dtype=torch.int64)
    device = tensors[0].device
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def _compile_cases(dtype: str, k: int) -> list[CompileCase]:
    block, warps = cut(2048)
    name, rows = f"{dtype} K{k} D2048", f"*{dtype}"
    constants = {"K": k, "BLOCK_D": block, "ALIGNED": True}
    routes = {"rank": "*i32", "row": "*i32", "weights": "*fp32", "peers": "*i64", "weight_peers": "*i64"}
    return [
        CompileCase(
            f"put rows {name}", _put_kernel, {"x": rows, **routes}, {"HAS_WEIGHTS": True, **constants}, num_warps=warps
        ),
        *(
            CompileCase(
                f"{'weighted ' if weighted else ''}sum of rows {name}",
                _sum_kernel,
                {"out": rows, **routes},
                {"HAS_WEIGHTS": weighted, **constants},
                num_warps=warps,
            )
            for weighted in (False, True)
        ),
        CompileCase(
            f"publish rows {name}",
            _publish_kernel,
            {"rows": rows, "to": rows, "received": "*i32", "ends": "*i32"},
            {"EXPERTS": 16, "BLOCK_D": block},
            unaligned=["own", "N", "E_local"],
            num_warps=warps,
        ),
    ]


COMPILE_CASES = [
    *_compile_cases("bf16", 8),
    *_compile_cases("fp32", 4),
    CompileCase(
        "gather of weights",
        _gather_kernel,
        {"peers": "*i64", "rank": "*i32", "row": "*i32", "out": "*fp32"},
        {"BLOCK": 256},
        unaligned=["R"],
    ),
]
