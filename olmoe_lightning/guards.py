"""What callbacks and modules may do around an optimizer that works on shards."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden


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


def reads_weights_between_steps(trainer: Trainer, module: LightningModule) -> bool:
    """Whether a callback or the module may look at weights after an optimizer step, before the next forward pass.

    Lightning's and our own callbacks do not, or ask for the ``state_dict``, which waits.
    """
    hooks = ("on_train_batch_end", "on_train_batch_start", "on_before_zero_grad")
    if any(is_overridden(hook, module) for hook in hooks):
        return True
    strangers = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if type(callback).__module__.split(".")[0] not in ("lightning", "olmoe_lightning")
    ]
    return any(is_overridden(hook, callback) for hook in hooks for callback in strangers)
