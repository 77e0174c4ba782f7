"""Our side: OLMoE's network, losses and optimizer in a bare loop.

S tokens of a sequence, T tokens of a microbatch.
"""

from __future__ import annotations

from typing import Any

import torch
from _bare_loop import OPTIMIZER, BareLoop, make_batches
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import keep_freed_memory
from olmoe_lightning.model import Transformer
from olmoe_lightning.model.losses import IGNORE_INDEX
from olmoe_lightning.module import OLMoE


class OurSide(BareLoop):
    """What ``training_step`` computes and ``configure_optimizers`` returns, without logging.

    Args:
        config: fields of :class:`ModelConfig`.
        seq_len: S.
        tokens: T.
        compile_blocks: the module's own option.
    """

    def __init__(self, config: dict[str, Any], seq_len: int, tokens: int, compile_blocks: bool) -> None:
        keep_freed_memory()  # as `fit` does
        module = OLMoE(
            ModelConfig.from_dict(config),
            learning_rate=OPTIMIZER["lr"],
            betas=OPTIMIZER["betas"],
            eps=OPTIMIZER["eps"],
            weight_decay=OPTIMIZER["weight_decay"],
            schedule="constant",
            compile_blocks=compile_blocks,
        )
        self.model = module.built()
        optimizer, _ = prepare(module)
        super().__init__(make_batches(module.config.vocab_size, seq_len, tokens), optimizer)

    def loss(self, batch: dict[str, Tensor], microbatches: int) -> Tensor:
        """Cross entropy; the router's losses join the backward pass inside the layers."""
        return bare_loss(self.model, batch, microbatches)


def bare_loss(model: Transformer, batch: dict[str, Tensor], microbatches: int = 1) -> Tensor:
    """The arithmetic of ``OLMoE.training_step`` where the mean is back-propagated, without its logging.

    Args:
        model: of the module.
        batch: as the module takes it.
        microbatches: whose gradients accumulate.

    Returns:
        fp32 [], the microbatch's share of the mean.
    """
    labels = batch["labels"]
    counted = labels != IGNORE_INDEX
    divisor = counted.sum().clamp(min=1) * microbatches
    hidden, _ = model(batch["input_ids"], batch.get("document_ids"), counted, 1.0 / divisor)
    return model.loss(hidden, labels).total / divisor


def prepare(module: LightningModule) -> tuple[torch.optim.Optimizer, Any]:
    """What ``Trainer.fit`` does before the first step, as far as speed depends on it.

    Args:
        module: gets a trainer that never runs, because ``configure_optimizers`` asks for the precision.

    Returns:
        Optimizer and learning-rate scheduler.
    """
    module.trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    configured: Any = module.configure_optimizers()
    return configured["optimizer"], configured["lr_scheduler"]["scheduler"]
