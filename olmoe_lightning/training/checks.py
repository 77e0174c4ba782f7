"""What callbacks and modules may do around an optimizer that works on shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer


def refuse_callbacks(trainer: Trainer) -> None:
    """Stop at callbacks that change weights or parameter groups themselves.

    Raises:
        MisconfigurationException: there is one.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging | BaseFinetuning):
            raise MisconfigurationException(
                f"{type(callback).__name__} changes weights or the optimizer's parameters behind the sharded "
                "optimizer; it cannot be used with MoEStrategy (average checkpoints afterwards, or freeze "
                "parameters before the run)"
            )


def refuse_dtypes(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Stop at parameters that fp32 masters cannot stand for.

    Raises:
        MisconfigurationException: the name and dtype of one.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise MisconfigurationException(
                f"{names.get(parameter, 'a parameter')} is {parameter.dtype}, but MoEStrategy keeps gradients and "
                "masters in float32; use float32 or bfloat16 parameters (two real ones for a complex one), or another "
                "strategy"
            )


_BETWEEN_STEPS = (
    "on_before_zero_grad",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_train_end",
)
"""Hooks that run before the strategy has waited for the weights of an optimizer step."""


def most_batches(trainer: Trainer) -> float:
    """The largest number of batches that a loader may be asked for, whichever it is."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    names = ("train", "val") if fitting else ("val", "test", "predict")
    limits = [getattr(trainer, f"limit_{name}_batches") for name in names]
    return max((limit if isinstance(limit, int) else float("inf") for limit in limits), default=float("inf"))


def reads_weights_between_steps(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a callback or the module may look at weights after an optimizer step, before the layers wait for them.

    Lightning's and our own callbacks do not, or ask for the ``state_dict``, which waits. Our modules read the weights
    of a block inside of it; a stranger's ``training_step`` may begin with a penalty on all of them.
    """
    steps = ("training_step", "optimizer_step", "lr_scheduler_step")
    if any(_is_a_strangers(module, hook) for hook in (*_BETWEEN_STEPS, *steps)):
        return True
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return any(
        isinstance(callback, ModelPruning) or any(_is_a_strangers(callback, hook) for hook in _BETWEEN_STEPS)
        for callback in callbacks
    )


def _is_a_strangers(owner: Any, hook: str) -> bool:
    # Asked of the instance: a LambdaCallback has its functions there.
    home = getattr(getattr(owner, hook, None), "__module__", None) or ""
    return hasattr(owner, hook) and home.split(".")[0] not in ("lightning", "olmoe_lightning")
