"""Initial weights as a pure function of (seed, parameter name, expert): any split of the model starts equal."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from typing_extensions import override


class Linear(nn.Linear):
    """A linear layer that leaves its weight to :func:`init_weights` instead of drawing one on construction."""

    @override
    def reset_parameters(self) -> None:
        """Nothing to do here."""


class Embedding(nn.Embedding):
    """An embedding that leaves its weight to :func:`init_weights` instead of drawing one on construction."""

    @override
    def reset_parameters(self) -> None:
        """Nothing to do here."""


def seeded_generator(seed: int, *key: str | int) -> torch.Generator:
    """A CPU generator whose stream depends on nothing but the seed and the key."""
    text = "/".join(map(str, (seed, *key)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def truncated_normal_(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill ``weight`` from N(0, std^2) cut at 3 sigma, drawn in fp32 on the CPU so that every device gets the same."""
    values = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
    nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
    weight.copy_(values)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, std: float, first_expert: int = 0) -> None:
    """Initialise every parameter and buffer of ``model`` in place.

    Matrices get a truncated normal, vectors (the norms' weights) ones, buffers (the routers' selection bias) zeros. A
    three-dimensional parameter stacks experts: it is drawn expert by expert under the expert's global index, so a rank
    that holds some of them draws the same values as a process that holds all.

    Args:
        model: its parameter names carry the global layer index.
        seed: of the whole run.
        std: standard deviation of the matrices.
        first_expert: global index of the first local expert.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        elif parameter.ndim == 3:  # not by an attribute: moving off the meta device makes new parameters without it
            for local, expert in enumerate(parameter.unbind(0)):
                truncated_normal_(expert, std, seeded_generator(seed, name, first_expert + local))
        else:
            truncated_normal_(parameter, std, seeded_generator(seed, name))
    for buffer in model.buffers():
        buffer.zero_()
