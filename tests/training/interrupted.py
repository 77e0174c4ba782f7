"""A script that trains until a signal ends it: ``python interrupted.py FOLDER``; see test_signals_from_outside.py."""

import os
import sys
import time
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy_lab import Items, WithExperts, vectors
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy


class Slow(WithExperts):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            (FOLDER / f"rank{self.global_rank}.pid").write_text(str(os.getpid()))
        time.sleep(0.01 * self.global_rank)  # one waits in an exchange of tokens while the other is between batches


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MoEStrategy(expert_parallel_size=2, async_save=True),
        callbacks=[ModelCheckpoint(FOLDER / "checkpoints", every_n_epochs=1000)],
        max_steps=100_000,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Slow(), DataLoader(Items(vectors(4) * 50_000), batch_size=None))
