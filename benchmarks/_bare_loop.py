"""Forward, backward, optimizer, without a trainer: what both sides of the comparison have in common.

B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

NUM_BATCHES = 8
"""Different batches that a side goes round and round through."""

OPTIMIZER: dict[str, Any] = {"lr": 4e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""AdamW's settings on both sides; both use torch's fused one."""


def make_batches(vocab_size: int, seq_len: int, tokens: int) -> list[dict[str, Tensor]]:
    """Random tokens, the same on every side.

    Args:
        vocab_size: token ids are below it.
        seq_len: S.
        tokens: B * S.

    Returns:
        Dictionaries of ``input_ids`` and ``labels``, both int64 [B, S]; labels are already shifted.
    """
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = torch.randint(0, vocab_size, (tokens // seq_len, seq_len + 1), generator=generator)
        batches.append({"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
    return batches


class BareLoop(ABC):
    """Trains when it is asked to.

    Args:
        batches: to go round and round through.
        optimizer: of the parameters that :meth:`loss` depends on.
    """

    def __init__(self, batches: list[dict[str, Tensor]], optimizer: torch.optim.Optimizer) -> None:
        self.batches = batches
        self.optimizer = optimizer
        self._next = 0

    @abstractmethod
    def loss(self, batch: dict[str, Tensor], microbatches: int) -> Tensor:
        """Of one microbatch, divided by their number; fp32 []."""

    def steps(self, count: int, warmup: int = 0, microbatches: int = 1) -> dict[str, Any]:
        """Train.

        Args:
            count: optimizer steps to time.
            warmup: steps before them that are not timed (caches are cold after the other side's turn).
            microbatches: batches whose gradients accumulate before the optimizer steps.

        Returns:
            ``seconds`` of each timed step, and the last ``loss`` in nats per token.
        """
        seconds = []
        total = torch.zeros(())
        for _ in range(warmup + count):
            start = time.perf_counter()
            total = torch.zeros(())
            for _ in range(microbatches):
                loss = self.loss(self.batches[self._next % len(self.batches)], microbatches)
                loss.backward()
                total = total + loss.detach()
                self._next += 1
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds[warmup:], "loss": total.item()}
