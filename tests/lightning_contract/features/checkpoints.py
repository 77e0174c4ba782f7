"""Checkpoints: when they are written, what they are called, and what a run makes of them."""

from datetime import timedelta

import torch
from contract import row
from laboratory import Ordinary
from lightning.pytorch.callbacks import ModelCheckpoint

GROUP = "Checkpoints"


def saved(lab, saves, module=None, **options):
    """A fit with a ModelCheckpoint, and the names in its folder."""
    found = lab.fit(module, saves, enable_checkpointing=True, **options)
    names = sorted(path.name for path in lab.folder.rglob("*.ckpt"))
    return {
        **found,
        "names": lab.first(names),
        "best": saves.best_model_path.split("/")[-1],
        "last": saves.last_model_path.split("/")[-1],
        "score": None if saves.best_model_score is None else round(float(saves.best_model_score), 1),
        "kept": sorted(path.split("/")[-1] for path in saves.best_k_models),
    }


def add(name, quick=False, fit=None, **options):
    @row(GROUP, f"`ModelCheckpoint({name})`", quick=quick)
    def _(lab):
        saves = ModelCheckpoint(lab.folder, **options)
        return saved(lab, saves, max_epochs=3, val=lab.loader(1, first=1), **fit or {})


add("")
add("save_last=True", save_last=True)
add("save_last='link'", save_last="link")
add("monitor, mode, save_top_k=2", monitor="val_loss", mode="max", save_top_k=2, filename="{epoch}-{step}")
add("save_top_k=-1", save_top_k=-1, filename="{epoch}")
add("save_top_k=0", save_top_k=0)
add("every_n_train_steps=3", every_n_train_steps=3, save_top_k=-1)
add("every_n_epochs=2", every_n_epochs=2, save_top_k=-1)
add("save_on_train_epoch_end=True", save_on_train_epoch_end=True, save_top_k=-1)
add("auto_insert_metric_name=False", auto_insert_metric_name=False, filename="e{epoch}", save_top_k=-1)
add("enable_version_counter=False", enable_version_counter=False, filename="same")
add("train_time_interval", train_time_interval=timedelta(hours=1))


def checkpointed(lab, module=None, steps=None, name="run.ckpt", weights_only=False, **options):
    """Train and save once."""
    trainer = lab.trainer(**{"max_epochs": 1 if steps is None else -1, "max_steps": steps or -1} | options)
    trainer.fit(module or Ordinary(), lab.loader())
    trainer.save_checkpoint(lab.folder / name, weights_only)
    return lab.folder / name


@row(GROUP, "`fit(ckpt_path=...)` at the end of an epoch", quick=True)
def _(lab):
    return lab.fit(max_epochs=2, ckpt_path=checkpointed(lab))


@row(GROUP, "`fit(ckpt_path=...)` in the middle of an epoch")
def _(lab):
    return lab.fit(max_epochs=2, ckpt_path=checkpointed(lab, steps=2))


def adamw(lab):
    class Decayed(Ordinary):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Decayed()


@row(GROUP, "moments and schedule go on at a resume")
def _(lab):
    return lab.fit(adamw(lab), max_epochs=2, ckpt_path=checkpointed(lab, adamw(lab)))


@row(GROUP, "a resume under accumulation")
def _(lab):
    path = checkpointed(lab, steps=1, accumulate_grad_batches=2)
    return lab.fit(max_epochs=2, ckpt_path=path, accumulate_grad_batches=2)


@row(GROUP, "`fit(ckpt_path='last')`")
def _(lab):
    saved(lab, ModelCheckpoint(lab.folder, save_last=True))
    saves = ModelCheckpoint(lab.folder, save_last=True)
    return lab.fit(None, saves, enable_checkpointing=True, max_epochs=2, ckpt_path="last")


@row(GROUP, "`validate`, `test`, `predict` with `ckpt_path`")
def _(lab):
    path, trainer = checkpointed(lab), lab.trainer()
    return {
        "validated": trainer.validate(Ordinary(), lab.loader(), verbose=False, ckpt_path=path),
        "tested": trainer.test(Ordinary(), lab.loader(), verbose=False, ckpt_path=path),
        "predicted": [
            lab.everywhere(batch.float()) for batch in trainer.predict(Ordinary(), lab.loader(), ckpt_path=path)
        ],
    }


@row(GROUP, "`test(ckpt_path='best')`")
def _(lab):
    trainer = lab.trainer(ModelCheckpoint(lab.folder, monitor="val_loss"), enable_checkpointing=True, max_epochs=3)
    module = Ordinary()
    trainer.fit(module, lab.loader(), lab.loader(1, first=1))
    return {"tested": trainer.test(module, lab.loader(2, first=2), verbose=False, ckpt_path="best")}


@row(GROUP, "`save_weights_only=True`")
def _(lab):
    path = checkpointed(lab, weights_only=True)
    return {"tested": lab.trainer().test(Ordinary(), lab.loader(), verbose=False, ckpt_path=path)}


@row(GROUP, "`save_weights_only=True` and a resume", "holds weights without the state of a training run")
def _(lab):
    path = checkpointed(lab, weights_only=True)
    return lab.fit(max_epochs=2, ckpt_path=path)


@row(GROUP, "`trainer.save_checkpoint` in the middle of a fit")
def _(lab):
    class Saves(Ordinary):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                self.trainer.save_checkpoint(lab.folder / "middle.ckpt")

    lab.fit(Saves())
    return lab.fit(ckpt_path=lab.folder / "middle.ckpt")


@row(GROUP, "`strict_loading=False`")
def _(lab):
    class Bigger(Ordinary):
        def __init__(self):
            super().__init__()
            self.strict_loading = False
            self.register_buffer("more", torch.tensor(2.0))

    path = checkpointed(lab)
    return {"tested": lab.trainer().test(Bigger(), lab.loader(), verbose=False, ckpt_path=path)}


@row(GROUP, "a missing checkpoint")
def _(lab):
    try:
        lab.fit(ckpt_path=lab.folder / "nowhere.ckpt")
    except Exception as error:
        return {"error": isinstance(error, FileNotFoundError)}
    return {"error": "none"}


@row(GROUP, "hyperparameters in a checkpoint")
def _(lab):
    class Saved(Ordinary):
        def __init__(self, lr=0.1, names=("a", "b")):
            super().__init__(lr)
            self.save_hyperparameters()

        def on_load_checkpoint(self, checkpoint):
            self.found = {name: str(value) for name, value in checkpoint["hyper_parameters"].items()}

    path, module = checkpointed(lab, Saved(lr=0.05)), Saved()
    lab.trainer().test(module, lab.loader(), verbose=False, ckpt_path=path)
    return {"hyperparameters": module.found}


@row(GROUP, "`enable_checkpointing=True` writes into `default_root_dir`")
def _(lab):
    found = lab.fit(enable_checkpointing=True)
    files = sorted(str(path.relative_to(lab.folder)) for path in lab.folder.rglob("*.ckpt"))
    return {**found, "files": lab.first(files)}
