"""The state of every random number generator of a process, in types that load without trust."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture_random_state(device: torch.device) -> dict[str, Any]:
    """States of PyTorch (CPU, and the device's), NumPy and Python.

    Args:
        device: of this process.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words), gauss],  # hundreds of numbers are read faster as a tensor
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(own: dict[str, Any] | None, first: dict[str, Any], rank: int, device: torch.device) -> None:
    """Go on where a process was.

    Args:
        own: its state; ``None`` if there was no such process: then every rank starts from numbers that depend on
            nothing but rank 0's state and the rank.
        first: rank 0's state.
        rank: of this process.
        device: of this process.
    """
    if own is None:
        source = torch.Generator()
        source.set_state(first["torch"])
        seeds = torch.randint(2**31, (rank + 1,), generator=source)
        seed = int(seeds[rank])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return
    torch.set_rng_state(own["torch"])
    version, words, gauss = own["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = own["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in own and device.type == "cuda":
        torch.cuda.set_rng_state(own["cuda"], device)
