"""Tokens to expert-major rows and back, within one process.

T tokens, K chosen experts, R = T*K rows, E experts, D model width.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from olmoe_lightning.kernels.choice import ROWS, on_gpu
from olmoe_lightning.kernels.routes import Permutation


def plan_permutation(expert_ids_TK: Tensor, num_experts: int) -> Permutation:
    """Sort the routes by expert; within an expert by token, so that the order is the same everywhere.

    Args:
        expert_ids_TK: int64 [T, K].
        num_experts: E.
    """
    if gpu := _gpu(expert_ids_TK):
        return gpu.plan_permutation(expert_ids_TK, num_experts)
    tokens, k = expert_ids_TK.shape
    flat = expert_ids_TK.reshape(-1)
    route_of_row = torch.argsort(flat, stable=True)
    row_of_route = torch.empty_like(route_of_row)
    row_of_route.scatter_(0, route_of_row, torch.arange(tokens * k, device=flat.device))
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    return Permutation(
        torch.div(route_of_row, k, rounding_mode="floor"),
        route_of_row,
        row_of_route.view(tokens, k),
        counts.cumsum(0).to(torch.int32),
    )


def _gather(x_TD: Tensor, token_of_row_R: Tensor) -> Tensor:
    if gpu := _gpu(token_of_row_R, x_TD):
        return gpu.gather_rows(x_TD, token_of_row_R)
    return x_TD.index_select(0, token_of_row_R)


def _gather_sum(rows_RD: Tensor, row_of_route_TK: Tensor) -> Tensor:
    if gpu := _gpu(row_of_route_TK, rows_RD):
        return gpu.gather_sum(rows_RD, row_of_route_TK)
    if rows_RD.device.type == "cpu" and rows_RD.dtype == torch.float32:
        # One pass over the rows: the sum happens while they are read.
        return F.embedding_bag(row_of_route_TK, rows_RD, mode="sum")
    tokens, k = row_of_route_TK.shape
    rows = rows_RD.index_select(0, row_of_route_TK.reshape(-1))
    return rows.view(tokens, k, rows_RD.shape[1]).sum(1, dtype=rows_RD.dtype)


def _gpu(numbers: Tensor, *rows: Tensor) -> ModuleType | None:
    """The Triton kernels, when they serve these operands: integers, and rows."""
    if not on_gpu(numbers, *rows) or any(each.dtype not in ROWS for each in rows):
        return None
    from olmoe_lightning.kernels.gpu import permute as kernels

    return kernels


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_of_row_R: Tensor, row_of_route_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_route_TK)
        return _gather(x_TD, token_of_row_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return _gather_sum(grad_RD.contiguous(), *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, token_of_row_R: Tensor, row_of_route_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row_R)
        return _gather_sum(rows_RD, row_of_route_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad_TD, *ctx.saved_tensors), None, None


def dispatch_rows(x_TD: Tensor, plan: Permutation) -> Tensor:
    """Copy each token to the rows of its K experts. Gather forward, gather-and-sum backward (no atomics).

    Args:
        x_TD: [T, D].
        plan: of these tokens.

    Returns:
        [R, D], expert-major.
    """
    return _Dispatch.apply(x_TD, plan.token_of_row_R, plan.row_of_route_TK)


def combine_rows(rows_RD: Tensor, plan: Permutation) -> Tensor:
    """Sum the K rows of each token; the inverse movement of :func:`dispatch_rows`.

    Args:
        rows_RD: [R, D], expert-major.
        plan: the one the rows were dispatched with.

    Returns:
        [T, D].
    """
    return _Combine.apply(rows_RD, plan.token_of_row_R, plan.row_of_route_TK)
