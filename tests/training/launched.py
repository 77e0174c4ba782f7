"""A training script as users write one, for the tests of launching: ``python launched.py MODE FOLDER``."""

import os
import sys
import time
from pathlib import Path

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])

if MODE == "first fails":  # either order of imports must do
    from lightning.pytorch import Trainer

    import olmoe_lightning
else:
    import olmoe_lightning  # isort: skip
    from lightning.pytorch import Trainer  # isort: skip

from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from strategy_lab import Dense, Items, vectors  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

FAILING = {"first fails": 0, "last fails": 1}.get(MODE)


class Fails(Dense):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2 and self.global_rank == FAILING:
            print(f"raised at {time.time()}", flush=True)
            raise ZeroDivisionError(f"rank {self.global_rank} has had enough")
        return super().training_step(batch, batch_idx)


def trainer(devices, *callbacks):
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="moe",
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main():
    print(f"process {os.getpid()}", flush=True)
    if MODE == "torchrun":
        try:
            trainer(4).fit(Dense(), DataLoader(Items(vectors(8)), batch_size=None))
        except (ValueError, MisconfigurationException) as error:
            print(f"refused: {error}", flush=True)
    fitted = trainer(2)
    fitted.fit(Dense(), DataLoader(Items(vectors(8)), batch_size=None))
    where = type(fitted.strategy.cluster_environment).__name__
    version = olmoe_lightning.__version__
    print(
        f"rank {fitted.global_rank} of {fitted.world_size} made {fitted.global_step} steps ({where}, {version})",
        flush=True,
    )
    if FAILING is not None:
        keep = ModelCheckpoint(FOLDER, save_on_exception=True) if FAILING else OnExceptionCheckpoint(FOLDER, "kept")
        trainer(2, keep).fit(Fails(), DataLoader(Items(vectors(8)), batch_size=None))


if __name__ == "__main__":
    main()
