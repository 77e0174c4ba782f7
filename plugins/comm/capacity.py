"""Which routes a group of experts keeps when more come than its capacity: without bias to an expert, rank or position.

Every process of the axis computes the same decision from the routes of all, with operations on tensors only. A group,
most often all experts of a process, takes the routes with the largest router weights, whatever expert they want and
wherever they come from. Equal weights are ordered by a hash of the route's number, the seed and the routing of the
whole batch: a fixed order of processes, tokens or experts would be a bias. The decision is a function of routing,
groups, capacity and seed: a recomputation, and any other number of processes, comes to the same one.

A tokens of all processes together, K chosen experts, F further ones of a token in its router's order, R = A*K routes,
E experts of all processes, N processes, G groups of E / G experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Overflow = Literal["drop", "spill", "error"]


class Admitted(NamedTuple):
    """What becomes of the routes."""

    expert_ids_AK: Tensor
    """int64 [A, K]: where a route goes; another expert than it wanted only after a spill."""
    keep_AK: Tensor
    """bool [A, K]."""


def admit(
    expert_ids_AK: Tensor,
    weights_AK: Tensor,
    fallback_ids_AF: Tensor | None,
    capacity: int,
    num_experts: int,
    groups: int,
    seed: int = 0,
) -> Admitted:
    """Fill each group of experts with the heaviest routes, and spill the others to the next expert of their tokens.

    Args:
        expert_ids_AK: int64 [A, K].
        weights_AK: fp32 [A, K]. A route that moves to another expert keeps its weight.
        fallback_ids_AF: int64 [A, F], experts that the token did not choose, the best first; ``None`` to drop what
            does not fit.
        capacity: routes that a group takes.
        num_experts: E.
        groups: G.
        seed: of the order of routes with equal weights.
    """
    local, (tokens, k) = num_experts // groups, expert_ids_AK.shape
    ids, weights = expert_ids_AK.reshape(-1), weights_AK.detach().reshape(-1)
    order = _order(ids, weights, seed)
    kept = _fits(ids // local, torch.ones_like(ids, dtype=torch.bool), order, ids.new_zeros(groups), capacity)
    if fallback_ids_AF is not None:
        for fallback_A in fallback_ids_AF.unbind(1):
            # One of a token's left routes tries each fallback, so that no two of them reach the same expert.
            left = ~kept.view(tokens, k)
            candidate = (left & (left.cumsum(1) == 1)).view(-1)
            wanted = fallback_A[:, None].expand(tokens, k).reshape(-1)
            moved = _fits(wanted // local, candidate, order, _count(ids // local, kept, groups), capacity)
            ids = torch.where(moved, wanted, ids)
            kept = kept | moved
    return Admitted(ids.view(tokens, k), kept.view(tokens, k))


def _order(ids_R: Tensor, weights_R: Tensor, seed: int) -> Tensor:
    """Routes by falling weight; among equal ones by a hash that differs from batch to batch. int64 [R]."""
    number = torch.arange(len(ids_R), device=ids_R.device)
    salt = _hash(number * 31 + ids_R * 0x9E3779B1).sum() + seed
    first = torch.argsort(_hash(number + _hash(salt)), stable=True)
    return first.index_select(0, torch.argsort(weights_R.index_select(0, first), descending=True, stable=True))


def _hash(number: Tensor) -> Tensor:
    """32 bits that look random, from integers (the finaliser of MurmurHash3)."""
    mask = 0xFFFFFFFF
    x = number & mask
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & mask
    return x ^ (x >> 16)


def _fits(group_R: Tensor, candidate_R: Tensor, order_R: Tensor, used_G: Tensor, capacity: int) -> Tensor:
    """Which candidate routes, taken in this order, fit into the capacity that their group has left."""
    groups = len(used_G)
    # Routes that are no candidates are counted to one more group, whose capacity is zero.
    wanted = torch.where(candidate_R, group_R, groups).index_select(0, order_R)
    place = torch.argsort(wanted, stable=True)
    wanted = wanted.index_select(0, place)
    counts = torch.zeros(groups + 1, dtype=torch.int64, device=wanted.device)
    counts.scatter_add_(0, wanted, torch.ones_like(wanted))
    position = torch.arange(len(wanted), device=wanted.device) - (counts.cumsum(0) - counts).index_select(0, wanted)
    left_G = torch.cat([capacity - used_G, used_G.new_zeros(1)])
    fits = position < left_G.index_select(0, wanted)
    return torch.zeros_like(candidate_R).scatter_(0, order_R.index_select(0, place), fits)


def _count(group_R: Tensor, which_R: Tensor, groups: int) -> Tensor:
    counts = torch.zeros(groups, dtype=torch.int64, device=group_R.device)
    return counts.scatter_add_(0, group_R, which_R.long())


@dataclass
class DropCounters:
    """What was dropped of this process' tokens since the last :meth:`reset`: tensors on the device, added up there.

    Args:
        num_experts: E.
        size: N.
        device: of the counters.
    """

    num_experts: int
    size: int
    device: torch.device
    routes: Tensor = field(init=False)
    """int64 []: routes that were requested."""
    dropped_by_expert: Tensor = field(init=False)
    """int64 [E]: by the expert that was chosen."""
    dropped_by_rank: Tensor = field(init=False)
    """int64 [N]: by the process that has it."""
    moved_by_expert: Tensor = field(init=False)
    """int64 [E]: routes that another expert took, by the one that was chosen."""
    weight_removed_by_expert: Tensor = field(init=False)
    """fp64 [E]: router weight of the dropped routes."""
    tokens: Tensor = field(init=False)
    """int64 []."""
    tokens_losing_any: Tensor = field(init=False)
    """int64 []: tokens with at least one dropped route."""
    tokens_losing_all: Tensor = field(init=False)
    """int64 []: tokens without a route left."""

    _NAMES: ClassVar[tuple[str, ...]] = (
        "routes", "tokens", "tokens_losing_any", "tokens_losing_all",
        "dropped_by_expert", "dropped_by_rank", "moved_by_expert", "weight_removed_by_expert",
    )  # fmt: skip

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        for name in ("routes", "tokens", "tokens_losing_any", "tokens_losing_all"):
            setattr(self, name, torch.zeros((), dtype=torch.int64, device=self.device))
        for name in ("dropped_by_expert", "moved_by_expert"):
            setattr(self, name, torch.zeros(self.num_experts, dtype=torch.int64, device=self.device))
        self.dropped_by_rank = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        # A sum over a whole run: fp32 would stop growing.
        self.weight_removed_by_expert = torch.zeros(self.num_experts, dtype=torch.float64, device=self.device)

    def read(self) -> dict[str, Tensor]:
        """Copies of the counters by name, where they are."""
        return {name: getattr(self, name).clone() for name in self._NAMES}

    def add(self, wanted_TK: Tensor, taken_TK: Tensor, keep_TK: Tensor, weights_TK: Tensor) -> None:
        """Count a dispatch.

        Args:
            wanted_TK: int64 [T, K], the experts that were chosen.
            taken_TK: int64 [T, K], those that the routes go to.
            keep_TK: bool [T, K].
            weights_TK: fp32 [T, K].
        """
        if not len(wanted_TK):
            return
        lost, flat = ~keep_TK, wanted_TK.reshape(-1)
        self.routes += flat.numel()
        self.tokens += len(wanted_TK)
        self.tokens_losing_any += lost.any(1).sum()
        self.tokens_losing_all += lost.all(1).sum()
        dropped = torch.zeros_like(self.dropped_by_expert).scatter_add_(0, flat, lost.reshape(-1).long())
        self.dropped_by_expert += dropped
        self.dropped_by_rank += dropped.view(self.size, -1).sum(1)
        self.moved_by_expert.scatter_add_(0, flat, (keep_TK & (wanted_TK != taken_TK)).reshape(-1).long())
        removed = torch.where(lost, weights_TK.detach().double(), 0.0)
        self.weight_removed_by_expert.scatter_add_(0, flat, removed.reshape(-1))

    @staticmethod
    def rates(total: Mapping[str, Tensor]) -> dict[str, float]:
        """What counters mean; copies them to the host.

        Args:
            total: by name, as :meth:`read` gives them, of all processes and layers together.

        Returns:
            ``dropped`` and ``moved``: shares of the routes. ``dropped_tokens`` and ``dropped_tokens_all``: shares of
            the tokens of a layer that lost any, and all, of their routes. ``dropped_weight``: router weight that a
            token of a layer lost, on average. ``dropped_expert_worst`` and ``dropped_rank_worst``: dropped routes of
            the expert, and of the process, that had most, relative to their mean.
        """
        host = {name: value.double().cpu() for name, value in total.items()}
        routes, tokens = (host[name].sum().clamp_min(1) for name in ("routes", "tokens"))
        by_expert, by_rank = host["dropped_by_expert"], host["dropped_by_rank"]
        found = {
            "dropped": by_expert.sum() / routes,
            "moved": host["moved_by_expert"].sum() / routes,
            "dropped_tokens": host["tokens_losing_any"].sum() / tokens,
            "dropped_tokens_all": host["tokens_losing_all"].sum() / tokens,
            "dropped_weight": host["weight_removed_by_expert"].sum() / tokens,
            "dropped_expert_worst": by_expert.max() / by_expert.mean().clamp_min(1e-9),
            "dropped_rank_worst": by_rank.max() / by_rank.mean().clamp_min(1e-9),
        }
        return {name: float(value) for name, value in found.items()}


def describe_drops(total: Mapping[str, Tensor]) -> str:
    """What was dropped, in a sentence; see :meth:`DropCounters.rates`."""
    rates = DropCounters.rates(total)
    dropped, routes = int(total["dropped_by_expert"].sum()), int(total["routes"].sum())
    return (
        f"{dropped} of {routes} routes were dropped ({rates['dropped']:.2%}); of the tokens in a layer "
        f"{rates['dropped_tokens']:.2%} lost a route and {rates['dropped_tokens_all']:.2%} all of them, with a router "
        f"weight of {rates['dropped_weight']:.4f} per token; {rates['moved']:.2%} of the routes went to another expert"
    )
