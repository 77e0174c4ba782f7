"""Triton: the row of each route, and how many routes each expert gets.

A route's row is its expert's first row plus the number of routes before it that have the same expert. That number has
two parts: the routes of earlier blocks, from a table of counts whose columns are summed up block by block, and those of
the same block, by comparing all pairs. Nothing is added atomically: there is one order only, that of the tokens.

T tokens, K chosen experts, R = T*K routes, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from olmoe_lightning.kernels.gpu.compile_case import CompileCase

BLOCK_R = 128
"""Routes of a block: their pairs are compared, so more would cost more than proportionally."""
_BLOCK_E = 32
_BLOCK_B = 64
"""Blocks of routes whose counts are summed up at once."""


@triton.jit
def _expert_of(ids, keep, routes, inside, HAS_KEEP: tl.constexpr):
    """The expert of each route; -1 for those that are dropped or not there."""
    taken = inside
    if HAS_KEEP:
        taken = inside & (tl.load(keep + routes, mask=inside, other=0) != 0)
    return tl.where(taken, tl.load(ids + routes, mask=inside, other=0).to(tl.int32), -1)


@triton.jit(do_not_specialize=["R"])
def _count_kernel(ids, keep, counts, R, E, HAS_KEEP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """One row of the table: the routes of a block to each expert."""
    block = tl.program_id(0)
    routes = block * BLOCK_R + tl.arange(0, BLOCK_R)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    expert = _expert_of(ids, keep, routes, routes < R, HAS_KEEP)
    found = tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts + block.to(tl.int64) * E + experts, found, mask=experts < E)


@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(counts, base, blocks, E, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """The table, in place: where the routes of a block to an expert begin."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    in_experts = experts < E
    start = tl.load(base + experts, mask=in_experts, other=0)
    for first in range(0, blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        at = counts + block.to(tl.int64)[:, None] * E + experts[None, :]
        inside = (block < blocks)[:, None] & in_experts[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, start[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        start += tl.sum(count, 0)


@triton.jit(do_not_specialize=["R"])
def _place_kernel(ids, keep, starts, rank, row, R, E, experts_local, HAS_KEEP: tl.constexpr, BLOCK_R: tl.constexpr):
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_R)
    routes = block * BLOCK_R + lane
    inside = routes < R
    expert = _expert_of(ids, keep, routes, inside, HAS_KEEP)
    before = (expert[None, :] == expert[:, None]) & (lane[None, :] < lane[:, None])
    start = tl.load(starts + block.to(tl.int64) * E + expert, mask=expert >= 0, other=0)
    tl.store(row + routes, tl.where(expert >= 0, start + tl.sum(before.to(tl.int32), 1), -1), mask=inside)
    # A route that is dropped has a process all the same.
    owner = tl.load(ids + routes, mask=inside, other=0).to(tl.int32) // experts_local
    tl.store(rank + routes, owner, mask=inside)


def count_routes(expert_ids_TK: Tensor, keep_TK: Tensor | None, num_experts: int) -> Tensor:
    """As ``kernels.rowwise.count_routes``: int32 [E]."""
    return _count(expert_ids_TK, keep_TK, num_experts).sum(0, dtype=torch.int32)


def place_routes(
    expert_ids_TK: Tensor, keep_TK: Tensor | None, base_E: Tensor, experts_local: int
) -> tuple[Tensor, Tensor]:
    """Process and row of each route.

    Args:
        expert_ids_TK: int64 [T, K].
        keep_TK: bool [T, K]; ``None`` for all.
        base_E: int32 [E], the row of each expert's first route.
        experts_local: experts of each process.

    Returns:
        int32 [T, K], the process; int32 [T, K], the row, -1 for a route that is dropped.
    """
    return _place(expert_ids_TK, keep_TK, _count(expert_ids_TK, keep_TK, len(base_E)), base_E, experts_local)


def sort_routes(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The place of each route among all, sorted by expert and then by token.

    Returns:
        int32 [T, K], the place; int64 [E], the end of each expert's routes.
    """
    counts_BE = _count(expert_ids_TK, None, num_experts)
    totals = counts_BE.sum(0, dtype=torch.int64)
    ends = totals.cumsum(0)
    base = (ends - totals).to(torch.int32)
    return _place(expert_ids_TK, None, counts_BE, base, num_experts)[1], ends


def _count(expert_ids_TK: Tensor, keep_TK: Tensor | None, num_experts: int) -> Tensor:
    """The table, int32 [blocks, E]."""
    ids, keep = _dense(expert_ids_TK, keep_TK)
    blocks = triton.cdiv(ids.numel(), BLOCK_R)
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids.device)
    if counts.numel():
        grid = (blocks, triton.cdiv(num_experts, _BLOCK_E))
        _count_kernel[grid](
            ids, keep, counts, ids.numel(), num_experts, HAS_KEEP=keep_TK is not None, BLOCK_R=BLOCK_R, BLOCK_E=_BLOCK_E
        )
    return counts


def _place(
    expert_ids_TK: Tensor, keep_TK: Tensor | None, counts_BE: Tensor, base_E: Tensor, experts_local: int
) -> tuple[Tensor, Tensor]:
    ids, keep = _dense(expert_ids_TK, keep_TK)
    blocks, experts = counts_BE.shape
    rank, row = (torch.empty_like(ids, dtype=torch.int32) for _ in range(2))
    if counts_BE.numel():
        _scan_kernel[(triton.cdiv(experts, _BLOCK_E),)](
            counts_BE, base_E.contiguous(), blocks, experts, BLOCK_B=_BLOCK_B, BLOCK_E=_BLOCK_E
        )
        _place_kernel[(blocks,)](
            ids, keep, counts_BE, rank, row, ids.numel(), experts, experts_local,
            HAS_KEEP=keep_TK is not None, BLOCK_R=BLOCK_R,
        )  # fmt: skip
    return rank, row


def _dense(ids: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contiguous ids and bytes; any pointer where there is no ``keep``."""
    ids = ids.contiguous()
    return ids, ids if keep is None else keep.contiguous().view(torch.uint8)


COMPILE_CASES = [
    CompileCase(
        "count of routes",
        _count_kernel,
        {"ids": "*i64", "keep": "*u8", "counts": "*i32"},
        {"HAS_KEEP": True, "BLOCK_R": BLOCK_R, "BLOCK_E": _BLOCK_E},
        unaligned=["R"],
    ),
    CompileCase(
        "starts of routes",
        _scan_kernel,
        {"counts": "*i32", "base": "*i32"},
        {"BLOCK_B": _BLOCK_B, "BLOCK_E": _BLOCK_E},
        unaligned=["blocks"],
    ),
    CompileCase(
        "route map",
        _place_kernel,
        {"ids": "*i64", "keep": "*u8", "starts": "*i32", "rank": "*i32", "row": "*i32"},
        {"HAS_KEEP": True, "BLOCK_R": BLOCK_R},
        unaligned=["R", "experts_local"],
    ),
]
