"""What callbacks and modules may do around an optimizer that works on shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from olmoe_lightning.parallel.ownership import Ownership
from olmoe_lightning.training.gradient_hooks import CALLBACK_HOOKS, MODULE_HOOKS


def refuse_manual_optimization(module: LightningModule) -> None:
    """Stop at a module that calls ``backward`` and ``step`` itself.

    Raises:
        MisconfigurationException: it does.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "MoEStrategy sums, divides and clips gradients itself, which needs automatic optimization; remove "
            "`self.automatic_optimization = False`, or take Lightning's `ddp` strategy for manual optimization"
        )


def refuse_own_backward(module: LightningModule) -> None:
    """Stop at a module whose ``backward`` would not be called.

    Raises:
        MisconfigurationException: it overrides it.
    """
    if is_overridden("backward", module):
        raise MisconfigurationException(
            f"{type(module).__name__} overrides backward, but a pipeline makes gradients in pipeline_step and calls no "
            "backward of a module; scale the loss in pipeline_loss, or set pipeline_parallel_size=1"
        )


def refuse_scaler(precision: Precision) -> None:
    """Stop at a precision whose scaler decides on each process for itself.

    Raises:
        MisconfigurationException: it has one.
    """
    if getattr(precision, "scaler", None) is not None or precision.precision == "16-true":
        raise MisconfigurationException(
            f"precision {precision.precision!r} needs a gradient scaler, whose decisions would differ "
            "between processes; use plugins=[BF16Precision()] or precision='bf16-mixed', which need none"
        )


def refuse_callbacks(trainer: Trainer) -> None:
    """Stop at callbacks that change weights or parameter groups themselves.

    Raises:
        MisconfigurationException: there is one.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging | BaseFinetuning):
            raise MisconfigurationException(
                f"{type(callback).__name__} changes weights or the optimizer's parameters behind the sharded "
                "optimizer; it cannot be used with MoEStrategy (average checkpoints afterwards, or freeze "
                "parameters before the run)"
            )


def refuse_dtypes(optimizer: Optimizer, ownership: Ownership) -> None:
    """Stop at parameters that fp32 masters cannot stand for.

    Raises:
        MisconfigurationException: the name and dtype of one.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise MisconfigurationException(
                f"{ownership.parameters.get(parameter, 'a parameter')} is {parameter.dtype}, but MoEStrategy keeps "
                "gradients and masters in float32; use float32 or bfloat16 parameters (two real ones for a complex "
                "one), or another strategy"
            )


def most_batches(trainer: Trainer) -> float:
    """The largest number of batches that a loader may be asked for, whichever it is."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    names = ("train", "val") if fitting else ("val", "test", "predict")
    limits = [getattr(trainer, f"limit_{name}_batches") for name in names]
    return max((limit if isinstance(limit, int) else float("inf") for limit in limits), default=float("inf"))


def fused_max_norm(trainer: Trainer, module: LightningModule) -> float | None:
    """The norm to clip to, where division and clipping can be one multiplication: nothing looks in between."""
    looks = any(is_overridden("on_before_optimizer_step", callback) for callback in callbacks_of(trainer))
    looks = looks or any(
        is_overridden(hook, module)
        for hook in ("on_before_optimizer_step", "on_after_backward", "configure_gradient_clipping")
    )
    by_norm = (trainer.gradient_clip_algorithm or "norm") == "norm"
    return float(trainer.gradient_clip_val) if trainer.gradient_clip_val and by_norm and not looks else None


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
_OF_MODULES = (*_BETWEEN_STEPS, "training_step", "optimizer_step", "lr_scheduler_step")
_STEPS = ("validation_step", "test_step", "predict_step", "configure_gradient_clipping", "optimizer_zero_grad")
_LIGHTNINGS = (
    LightningModule,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,  # asks for the state_dict, which waits
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
"""Classes of Lightning that do not read weights in these hooks, or wait for them."""
_KNOWN = frozenset(base for known in _LIGHTNINGS for base in known.__mro__)


def reads_weights_between_steps(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a callback or the module may look at weights after an optimizer step, before the layers wait for them.

    A class says that its hooks do not, or wait for them with ``strategy.wait_for_weights()``, by an attribute
    ``reads_weights_between_steps = False`` in the class that defines the hook; of Lightning's classes it is known. Any
    other hook may: a ``training_step`` may begin with a penalty on all weights.
    """
    return any(_may_read(module, hook) for hook in _OF_MODULES) or any(
        _may_read(callback, hook) for callback in callbacks_of(trainer) for hook in _BETWEEN_STEPS
    )


def sets_weights(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a callback or the module has a hook in which it may set weights during a fit.

    A class says that its hooks do not by the same attribute ``reads_weights_between_steps = False``.
    """
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    return any(_may_read(module, hook) for hook in (*hooks, *_OF_MODULES, *_STEPS)) or any(
        _may_read(callback, hook) for callback in callbacks_of(trainer) for hook in hooks
    )


def gradient_hooks(trainer: Trainer, module: LightningModule) -> set[str]:
    """Hooks in which a callback or the module may look at gradients, or change them.

    A class says that its hooks do not by an attribute ``reads_gradients = False`` in the class that defines the hook;
    of Lightning's classes it is known.
    """
    owners: list[tuple[Any, Sequence[str]]] = [(module, MODULE_HOOKS)]
    owners += [(callback, CALLBACK_HOOKS) for callback in callbacks_of(trainer)]
    return {hook for owner, hooks in owners for hook in hooks if _may_read(owner, hook, "reads_gradients")}


def _may_read(owner: Any, hook: str, says: str = "reads_weights_between_steps") -> bool:
    if hook in vars(owner):  # a LambdaCallback has its functions there
        return True
    home = next((base for base in type(owner).__mro__ if hook in vars(base)), None)
    return home is not None and home not in _KNOWN and vars(home).get(says, True)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The callbacks of a trainer, which its class does not declare."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
