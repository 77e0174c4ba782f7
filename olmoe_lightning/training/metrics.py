"""Metrics of a language model as sums over tokens, exact on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module
from torchmetrics import Metric
from typing_extensions import override

from olmoe_lightning.model.losses import IGNORE_INDEX

STEP_METRICS = ("loss", "perplexity", "lm_z_loss", "balance_loss", "router_z_loss")
"""What is logged of each step."""


class TokenMean(Metric):
    """A sum divided by a count, both summed over batches and processes: a mean over tokens (or bytes), not of means.

    Args:
        kwargs: of :class:`torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor | int) -> None:
        """Add a sum (fp32 []) and the number of things it sums over."""
        self.total += total.detach()
        self.count += count

    def compute(self) -> Tensor | None:
        """The mean, fp32 []; ``None``, which is not logged, when nothing was counted on any process."""
        return (self.total / self.count).float() if self.count else None

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Module:
        # A model that is cast to bf16 takes its metrics along, where a sum would stop growing at 256 of its terms.
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), exclude_state)


class Perplexity(TokenMean):
    """``exp`` of the mean cross entropy in nats.

    It takes the cross-entropy sum, because the full logits (which :class:`torchmetrics.text.Perplexity` wants) never
    exist; the value is the same.
    """

    higher_is_better = False

    def compute(self) -> Tensor | None:
        """fp32 [], or ``None``."""
        mean = super().compute()
        return None if mean is None else mean.exp()


class OfStep(Metric):
    """A value of the last batch. Lightning logs a number that is not replaced again; this can be nothing, too.

    Args:
        kwargs: of :class:`torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._value: Tensor | None = None

    def update(self, value: Tensor | None) -> None:
        """Replace it."""
        self._value = value

    def compute(self) -> Tensor | None:
        """It."""
        return self._value


def has_label(batch: Mapping[str, Tensor]) -> bool:
    """Whether any label of a batch counts: without one there is no mean to log. It waits for the device."""
    labels = batch.get("labels")
    return labels is not None and bool((labels != IGNORE_INDEX).any())


class LanguageModelMetrics(nn.Module):
    """All metrics that :class:`~olmoe_lightning.OLMoE` logs."""

    def __init__(self) -> None:
        super().__init__()
        self.of_step = nn.ModuleDict({name: OfStep() for name in STEP_METRICS})
        """In training, by name."""
        self.loss = TokenMean()
        self.perplexity = Perplexity()
        self.nats_per_byte = TokenMean()
        self.balance_loss = TokenMean()
        self.router_z_loss = TokenMean()
        # A list beside the names: a source may be called anything, also what a module's attribute cannot be called.
        self.source_losses = nn.ModuleList()
        self.source_names: list[str] = []

    def set_sources(self, names: Sequence[str]) -> None:
        """Prepare the loss of each source of the data.

        Args:
            names: in the order of ``source_ids``; equal ones get a number so that each has its own curve.
        """
        self.source_names = [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]
        device = self.loss.device
        self.source_losses = nn.ModuleList(TokenMean().to(device) for _ in names)
