"""Weights in bfloat16, their fp32 masters in the optimizer."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from olmoe_lightning.errors import UserError
from olmoe_lightning.plugins.precision.base import KeepsMasters


class BF16Precision(Precision):
    """Computes with bfloat16 weights and activations.

    Under :class:`~olmoe_lightning.MoEStrategy` the optimizer updates fp32 masters, which start from the module's fp32
    values, and gradients are accumulated in fp32. The router's scores, the norms' statistics and the losses are fp32 by
    themselves. No gradient scaler is needed: bfloat16 has the exponent of fp32.

    Other strategies have no masters: small updates would be rounded away. ``fit`` refuses that; for evaluation any
    strategy will do.
    """

    precision: Literal["bf16"] = "bf16"  # type: ignore[assignment]  # Lightning's list of names is closed
    param_dtype = torch.bfloat16
    """Of the weights while computing; the strategy reads it."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast parameters and floating-point buffers in place; those that must stay fp32 see to it themselves."""
        return module.to(torch.bfloat16)

    @override
    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors of a batch in bfloat16."""
        return apply_to_collection(data, Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Refuse to train under a strategy that keeps no fp32 masters.

        Raises:
            UserError: the strategy is not :class:`~olmoe_lightning.MoEStrategy`.
        """
        assert isinstance(model, LightningModule)
        strategy = model.trainer.strategy
        if optimizers and not isinstance(strategy, KeepsMasters):
            raise UserError(
                f"BF16Precision needs fp32 masters, which {type(strategy).__name__} does not keep; use "
                "strategy=MoEStrategy() (one process is enough), or precision='bf16-mixed' without this plugin"
            )
        return super().connect(model, optimizers, lr_schedulers)
