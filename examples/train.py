"""The same as quickstart.yaml, as a script: a Trainer, a module, a data module.

python examples/train.py --max-steps 250
"""

from __future__ import annotations

import argparse

from lightning.pytorch import Trainer, seed_everything

from olmoe_lightning import ModelConfig, OLMoE, TokenDataModule
from olmoe_lightning.callbacks import (
    ExpertLoadMonitor,
    MemoryMonitor,
    NextSteps,
    OneLineProgress,
    SampleText,
    ThroughputMonitor,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="name of a model configuration")
    parser.add_argument("--max-steps", type=int, default=250, help="optimizer steps")
    parser.add_argument("--val-batches", type=int, default=24, help="batches of a validation")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--root", default="runs", help="folder for logs and checkpoints")
    options = parser.parse_args()

    seed_everything(42)
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=1,
        strategy="moe",  # in one process too: steps and checkpoints are as safe as in many
        max_steps=options.max_steps,
        val_check_interval=max(1, options.max_steps // 2),
        check_val_every_n_epoch=None,
        limit_val_batches=options.val_batches,
        gradient_clip_val=1.0,
        log_every_n_steps=min(20, options.max_steps),
        default_root_dir=options.root,
        enable_model_summary=False,  # OLMoE says its size itself
        callbacks=[
            ThroughputMonitor(),
            ExpertLoadMonitor(),
            MemoryMonitor(),
            OneLineProgress(),
            SampleText(),
            NextSteps(),
        ],
    )
    module = OLMoE(ModelConfig.preset(options.preset), learning_rate=3e-3, warmup_steps=min(50, options.max_steps // 2))
    trainer.fit(module, TokenDataModule(tokenizer="bpe:2048", seq_len=256, batch_size=16))


if __name__ == "__main__":
    main()
