"""The largest values of each row, with a fixed order of ties.

E values per row, k chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from olmoe_lightning.kernels.choice import on_cpu
from olmoe_lightning.kernels.cpu.native import call, threads


def top_k_stable(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest values of each row, largest first; among equal values the lower index first.

    ``torch.topk`` leaves the order of ties open, and it differs between devices. NaN counts as the largest.

    Args:
        scores: fp32 [..., E].
        k: at most E.

    Returns:
        int64 [..., k].
    """
    scores = scores.detach().contiguous()
    size = scores.shape[-1]
    if on_cpu(scores) and 0 < k <= size:
        indices = torch.empty(*scores.shape[:-1], k, dtype=torch.int64)
        call("top_k_rows", scores, scores.numel() // size, size, k, indices, threads())
        return indices
    # Each fp32 score becomes an int64 key, the score's bits made monotonic in the upper half and the reversed index in
    # the lower: no two are equal. The bits of negative floats order backwards; -0.0 (the smallest int32) must equal 0.
    bits = scores.view(torch.int32)
    bits = torch.where(bits < 0, torch.bitwise_xor(bits, 0x7FFFFFFF) + 1, bits).long()
    reversed_index = torch.arange(size - 1, -1, -1, device=scores.device)
    keys = torch.bitwise_or(torch.bitwise_left_shift(bits, 32), reversed_index)
    top = torch.topk(keys, k, dim=-1).values
    return size - 1 - torch.bitwise_and(top, 0xFFFFFFFF)
