"""Routed rows in the memory of peers: where each belongs, writing them there, and reading them back to sum them.

Nothing here reads a value of a tensor on the host. A row number of -1 means that the route was dropped. Everything
has a PyTorch reference, which also serves traced and fake tensors; CUDA tensors take Triton, CPU tensors C++.

T tokens, K chosen experts, E experts of all processes, E_local of each, N processes, D model width, C rows that fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from olmoe_lightning.kernels.choice import ROWS, on_cpu, on_gpu
from olmoe_lightning.kernels.cpu.native import call, threads
from olmoe_lightning.kernels.routes import Routes, Window


def count_routes(expert_ids_TK: Tensor, keep_TK: Tensor | None, num_experts: int) -> Tensor:
    """How many routes each expert gets from here.

    Args:
        expert_ids_TK: int64 [T, K].
        keep_TK: bool [T, K]; ``None`` for all.
        num_experts: E.

    Returns:
        int32 [E].
    """
    if gpu := _gpu(expert_ids_TK, keep_TK):
        return gpu.count_routes(expert_ids_TK, keep_TK, num_experts)
    flat = expert_ids_TK.reshape(-1)
    ones = torch.ones_like(flat, dtype=torch.int32) if keep_TK is None else keep_TK.reshape(-1).to(torch.int32)
    return torch.zeros(num_experts, dtype=torch.int32, device=flat.device).scatter_add_(0, flat, ones)


def plan_routes(
    expert_ids_TK: Tensor, keep_TK: Tensor | None, counts_NE: Tensor, rank: int
) -> tuple[Routes, Tensor, Tensor]:
    """Where each row goes: on the process of its expert, rows are sorted by expert, then by source, then by token.

    Args:
        expert_ids_TK: int64 [T, K], of this process.
        keep_TK: bool [T, K], the routes that are not dropped; ``None`` for all.
        counts_NE: int32 [N, E], routes of each process to each expert, without those that are dropped.
        rank: of this process.

    Returns:
        The routes; int32 [N, E_local], what this process receives; int32 [E_local], the ends of its experts' rows.
    """
    size, experts = counts_NE.shape
    local = experts // size
    totals = counts_NE.sum(0, dtype=torch.int32).view(size, local)
    ends = totals.cumsum(1, dtype=torch.int32)
    base_E = (ends - totals).view(-1) + counts_NE[:rank].sum(0, dtype=torch.int32)
    received = counts_NE[:, rank * local : (rank + 1) * local].contiguous()
    return _place(expert_ids_TK, keep_TK, base_E, local), received, ends[rank].contiguous()


def _place(expert_ids_TK: Tensor, keep_TK: Tensor | None, base_E: Tensor, experts_local: int) -> Routes:
    experts = len(base_E)
    if gpu := _gpu(expert_ids_TK, keep_TK):
        return Routes(*gpu.place_routes(expert_ids_TK, keep_TK, base_E, experts_local))
    if on_cpu(expert_ids_TK, keep_TK, dtypes=(torch.int64, torch.bool)):
        ids = expert_ids_TK.contiguous()
        keep = None if keep_TK is None else keep_TK.contiguous()
        routes = Routes(torch.empty_like(ids, dtype=torch.int32), torch.empty_like(ids, dtype=torch.int32))
        call("rowwise_plan", ids, keep, base_E, ids.numel(), experts, experts_local, *routes)
        return routes
    flat = expert_ids_TK.reshape(-1)
    # What is dropped stands behind all experts.
    sorting = flat if keep_TK is None else torch.where(keep_TK.reshape(-1), flat, experts)
    order = torch.argsort(sorting, stable=True)
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, sorting, torch.ones_like(sorting))
    starts = counts.cumsum(0) - counts
    row = base_E.index_select(0, flat) + position - starts.index_select(0, flat)
    if keep_TK is not None:
        row = torch.where(keep_TK.reshape(-1), row, -1)
    rank = torch.div(flat, experts_local, rounding_mode="floor")
    return Routes(*(each.to(torch.int32).view(expert_ids_TK.shape) for each in (rank, row)))


def put_rows(x_TD: Tensor, weights_TK: Tensor | None, routes: Routes, windows: Sequence[Window]) -> None:
    """Write each token to the rows of its experts, and its weights beside them.

    Args:
        x_TD: [T, D].
        weights_TK: fp32 [T, K]; ``None`` to write rows only.
        routes: of these tokens.
        windows: of every process, by rank.
    """
    if gpu := _gpu(routes.row_TK, x_TD, windows[0].rows):
        gpu.put_rows(x_TD, weights_TK, routes, windows)
        return
    x_TD = x_TD.contiguous()
    if _native(x_TD, windows[0].rows):
        weights = None if weights_TK is None else weights_TK.contiguous()
        tokens, k = routes.row_TK.shape
        rows, numbers = [window.rows for window in windows], [window.weights for window in windows]
        nbytes = x_TD.shape[1] * x_TD.itemsize
        call("rowwise_put", x_TD, weights, *routes, tokens, k, nbytes, rows, numbers, threads())
        return
    k = routes.row_TK.shape[1]
    rows_RD = x_TD.repeat_interleave(k, 0) if k > 1 else x_TD
    rank, row = (each.reshape(-1) for each in routes)
    for peer, window in enumerate(windows):
        spare = len(window.rows) - 1
        place = torch.where((rank == peer) & (row >= 0), row, spare).long()
        window.rows.index_copy_(0, place, rows_RD)
        if weights_TK is not None:
            window.weights.index_copy_(0, place, weights_TK.reshape(-1))


def publish_rows(rows_CD: Tensor, weights_C: Tensor | None, received_NL: Tensor, rank: int, window: Window) -> Tensor:
    """Copy rows to where other processes can read them; those that this process sent to itself may stay.

    Args:
        rows_CD: [C, D], sorted by local expert, then by source.
        weights_C: fp32 [C], or ``None``.
        received_NL: int32 [N, E_local], rows from each process for each expert.
        rank: of this process.
        window: of this process.

    Returns:
        The rows as this process should read them.
    """
    if gpu := _gpu(received_NL, rows_CD, window.rows):
        return gpu.publish_rows(rows_CD, weights_C, received_NL, rank, window)
    rows_CD = rows_CD.contiguous()
    if weights_C is not None:
        window.weights[: len(weights_C)].copy_(weights_C)
    if _native(rows_CD, window.rows):
        nbytes = rows_CD.shape[1] * rows_CD.itemsize
        call("rowwise_publish", rows_CD, received_NL, *received_NL.shape, rank, nbytes, window.rows, threads())
        return rows_CD
    window.rows[: len(rows_CD)].copy_(rows_CD)
    return window.rows


def sum_rows(rows: Sequence[Tensor], routes: Routes, weights_TK: Tensor | None = None) -> Tensor:
    """Read the rows of each token from the processes that have them, and add them in the order of its experts.

    Args:
        rows: [at least C, D], of every process, by rank.
        routes: where the rows are.
        weights_TK: fp32 [T, K], a factor of each row; ``None`` for the plain sum. What stands beside a route that was
            dropped may be NaN.

    Returns:
        [T, D]; zero for a token without rows.
    """
    (tokens, k), width = routes.row_TK.shape, rows[0].shape[1]
    if gpu := _gpu(routes.row_TK, *rows):
        return gpu.sum_rows(rows, routes, weights_TK)
    if weights_TK is None and _native(*rows):
        out = rows[0].new_empty(tokens, width)
        call("rowwise_sum", rows, *routes, tokens, k, width, out.dtype == torch.bfloat16, out, threads())
        return out
    parts = _pick(rows, routes).view(tokens, k, width)
    # Half precision is added in fp32 and rounded once, as the kernels do.
    wide = torch.promote_types(parts.dtype, torch.float32)
    if weights_TK is None:
        return parts.sum(1, dtype=wide).to(parts.dtype)
    factors = torch.where(routes.row_TK >= 0, weights_TK, 0).to(wide)
    return (parts.to(wide) * factors[:, :, None]).sum(1).to(parts.dtype)


def gather_weights(weights: Sequence[Tensor], routes: Routes) -> Tensor:
    """Read one number per route, fp32 [T, K]; zero for a route that was dropped."""
    if gpu := _gpu(routes.row_TK, *weights):
        return gpu.gather_weights(weights, routes)
    if _native(*weights):
        out = torch.empty(routes.row_TK.shape)
        call("rowwise_gather", weights, *routes, out.numel(), out)
        return out
    return _pick(weights, routes).view(routes.row_TK.shape)


def _pick(values: Sequence[Tensor], routes: Routes) -> Tensor:
    """The row of each route, [T*K, ...]."""
    rank, row = (each.reshape(-1) for each in routes)
    picked = values[0].new_zeros(len(row), *values[0].shape[1:])
    for peer, value in enumerate(values):
        here = (rank == peer) & (row >= 0)
        rows = value.index_select(0, torch.where(here, row, 0))
        # Chosen, not multiplied by zero: what lies in other rows may be NaN.
        picked = torch.where(here.view(-1, *[1] * (value.dim() - 1)), rows, picked)
    return picked


def _gpu(numbers: Tensor, *rows: Tensor | None) -> ModuleType | None:
    """The Triton kernels, when they serve these operands: integers, and rows or bytes."""
    kinds = (*ROWS, torch.bool)
    if not on_gpu(numbers, *rows) or any(each is not None and each.dtype not in kinds for each in rows):
        return None
    from olmoe_lightning.kernels.gpu import rows as kernels

    return kernels


def _native(*tensors: Tensor) -> bool:
    """Whether the C++ kernels serve these rows, or what stands beside them."""
    return on_cpu(*tensors, dtypes=(torch.float32, torch.bfloat16)) and all(each.is_contiguous() for each in tensors)
