"""Lightning's callbacks, and callbacks of users."""

import torch
from contract import row
from hook_trace import Trace
from laboratory import LAYERS, Early, Ordinary
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger

GROUP = "Callbacks"
BEHIND = "changes weights or the optimizer's parameters behind the sharded optimizer"


@row(GROUP, "`EarlyStopping` with patience", quick=True)
def _(lab):
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    return {
        **lab.fit(None, stop, max_epochs=6, val=lab.loader(2, first=1)),
        "best": float(stop.best_score),
        "epoch": stop.stopped_epoch,
    }


@row(GROUP, "`EarlyStopping` on a training metric, `stopping_threshold`, `check_on_train_epoch_end`")
def _(lab):
    stop = EarlyStopping("train_loss", stopping_threshold=1e3, check_on_train_epoch_end=True)
    return {**lab.fit(None, stop, max_epochs=4), "epoch": stop.stopped_epoch}


@row(GROUP, "`EarlyStopping(check_finite=True)` and a metric that is not finite")
def _(lab):
    class Infinite(Ordinary):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.mean(batch).float() * float("inf"), sync_dist=True)

    stop = EarlyStopping("val_loss")
    return {"epoch": lab.fit(Infinite(), stop, max_epochs=4, val=lab.loader(1))["epochs"], "at": stop.stopped_epoch}


@row(GROUP, "`EarlyStopping` on a metric that is not logged")
def _(lab):
    try:
        lab.fit(None, EarlyStopping("missing"), val=lab.loader(1))
    except RuntimeError as error:
        return {"error": str(error).split("Pass in")[0]}
    return {"error": None, "none": "raised"}


@row(GROUP, "`LearningRateMonitor` with momentum and weight decay")
def _(lab):
    class Scheduled(Ordinary):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.01)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
            }

    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    lab.fit(Scheduled(), monitor, logger=CSVLogger(lab.folder))
    return {"rates": dict(monitor.lrs)}


@row(GROUP, "`GradientAccumulationScheduler`")
def _(lab):
    return lab.fit(None, GradientAccumulationScheduler({0: 1, 1: 2}), max_epochs=2)


@row(GROUP, "`LambdaCallback`")
def _(lab):
    seen = []
    callback = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step),
        on_train_end=lambda *_: seen.append("end"),
    )
    return {"seen": seen, **lab.fit(None, callback)}


@row(GROUP, "`Timer`")
def _(lab):
    timer = Timer(duration="00:01:00:00", interval="step")
    found = lab.fit(None, timer)
    return {"running": timer.time_elapsed("train") > 0, "left": timer.time_remaining() > 0, **found}


@row(GROUP, "`Timer` that ends the run")
def _(lab):
    return lab.fit(None, Timer(duration={"seconds": 0}, interval="epoch"), max_epochs=3)


@row(GROUP, "`ModelSummary`")
def _(lab):
    return lab.fit(None, ModelSummary(2))


@row(GROUP, "`TQDMProgressBar`")
def _(lab):
    return lab.fit(None, TQDMProgressBar(1), enable_progress_bar=True, val=lab.loader(1))


@row(GROUP, "`DeviceStatsMonitor`")
def _(lab):
    return lab.fit(None, DeviceStatsMonitor(cpu_stats=False), logger=CSVLogger(lab.folder))


@row(GROUP, "`ThroughputMonitor`")
def _(lab):
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)
    return lab.fit(None, monitor, logger=CSVLogger(lab.folder))


@row(GROUP, "`OnExceptionCheckpoint` without an exception")
def _(lab):
    found = lab.fit(None, OnExceptionCheckpoint(lab.folder), enable_checkpointing=True)
    return {**found, "files": lab.first(sorted(path.name for path in lab.folder.glob("on_exception*")))}


@row(GROUP, "`LearningRateFinder`")
def _(lab):
    finder = LearningRateFinder(num_training_steps=8, min_lr=1e-4, max_lr=1e-1, early_stop_threshold=None)
    module = Ordinary()
    found = lab.fit(module, finder, train=lab.loader(10))
    rates, suggested = finder.optimal_lr.results["lr"], finder.optimal_lr.suggestion()
    return {"rates": rates, "one rate": lab.agreed(suggested), "steps": found["steps"]}


@row(GROUP, "`StochasticWeightAveraging`", BEHIND)
def _(lab):
    return lab.fit(None, StochasticWeightAveraging(0.1), max_epochs=2)


@row(GROUP, "`EMAWeightAveraging`, `WeightAveraging`", BEHIND)
def _(lab):
    return lab.fit(None, EMAWeightAveraging(), max_epochs=2)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.layers["0"])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers["0"], optimizer)


@row(GROUP, "`BaseFinetuning`, `BackboneFinetuning`", BEHIND)
def _(lab):
    assert issubclass(BackboneFinetuning, BaseFinetuning)
    return lab.fit(Early(), Unfreezes(), max_epochs=2)


@row(GROUP, "`BasePredictionWriter`, by batch and by epoch")
def _(lab):
    seen = {"batches": [], "epochs": []}

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            seen["batches"].append((batch_idx, lab.everywhere(prediction.float())))

        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            seen["epochs"].append(len(predictions))

    lab.trainer(Writer("batch_and_epoch")).predict(Ordinary(), lab.loader())
    return seen


class Counts(Callback):
    def __init__(self, key="counts"):
        self.key, self.count = key, 0

    @property
    def state_key(self):
        return self.key

    def on_train_batch_end(self, *_):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@row(GROUP, "a callback's state in a checkpoint", quick=True)
def _(lab):
    lab.fit(None, Counts(), Counts("others"), ModelCheckpoint(lab.folder, filename="run"), enable_checkpointing=True)
    counts = Counts()
    found = lab.fit(None, counts, Counts("others"), max_epochs=2, ckpt_path=lab.folder / "run.ckpt")
    return {"count": counts.count, **found}


@row(GROUP, "`on_save_checkpoint`, `on_load_checkpoint` of a callback")
def _(lab):
    seen = []

    class Adds(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["added"] = {"step": trainer.global_step}

        def on_load_checkpoint(self, trainer, pl_module, checkpoint):
            seen.append(checkpoint["added"])

    lab.fit(None, Adds(), ModelCheckpoint(lab.folder, filename="run"), enable_checkpointing=True)
    return {"seen": seen, **lab.fit(None, Adds(), max_epochs=2, ckpt_path=lab.folder / "run.ckpt")}


@row(GROUP, "`configure_callbacks` of the module")
def _(lab):
    counts = Counts()

    class Brings(Ordinary):
        def configure_callbacks(self):
            return [counts]

    return {**lab.fit(Brings()), "count": counts.count}


@row(GROUP, "a callback clamps weights in `on_train_batch_end`")
def _(lab):
    class Clamps(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.clamp_(-0.2, 0.2)

    return lab.fit(None, Clamps())


@row(GROUP, "a callback sets weights in `on_train_start`")
def _(lab):
    class Halves(Callback):
        def on_train_start(self, trainer, pl_module):
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(0.5)

    return lab.fit(None, Halves())


@row(GROUP, "a callback changes gradients in `on_before_optimizer_step`")
def _(lab):
    class Scales(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    return lab.fit(None, Scales())


@row(GROUP, "a callback changes gradients in `on_after_backward`")
def _(lab):
    class Signs(Callback):
        def on_after_backward(self, trainer, pl_module):
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.01, 0.01)

    return lab.fit(None, Signs())


@row(GROUP, "a callback changes the learning rate")
def _(lab):
    class Lowers(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.1 / (batch_idx + 1)

    return lab.fit(None, Lowers())


@row(GROUP, "`ModelPruning`", {"PP 2": "are trained by several stages of the pipeline, each its own copy"})
def _(lab):
    return lab.fit(Early(), ModelPruning("l1_unstructured", amount=0.5))


@row(GROUP, "a callback freezes parameters before the fit")
def _(lab):
    class Freezes(Callback):
        def setup(self, trainer, pl_module, stage):
            pl_module.configure_model()
            for layer in range(LAYERS // 2):
                if str(layer) in pl_module.layers:
                    pl_module.layers[str(layer)].requires_grad_(False)

    return lab.fit(None, Freezes())


def traced(lab, run):
    trace = Trace()
    kind = trace.recording(Ordinary, "module")
    del kind.backward  # to override it has a meaning in a pipeline
    module = kind()
    callback = trace.recording(Callback, "callback")()
    run(lab.trainer(callback, accumulate_grad_batches=2, num_sanity_val_steps=1), module)
    return {"hooks": trace.lines}


@row("Hooks", "the order of all hooks of `fit`, with sanity check, validation and accumulation", quick=True)
def _(lab):
    return traced(lab, lambda trainer, module: trainer.fit(module, lab.loader(), lab.loader(2)))


@row("Hooks", "the order of all hooks of `validate`")
def _(lab):
    return traced(lab, lambda trainer, module: trainer.validate(module, lab.loader(), verbose=False))


@row("Hooks", "the order of all hooks of `test`")
def _(lab):
    return traced(lab, lambda trainer, module: trainer.test(module, lab.loader(), verbose=False))


@row("Hooks", "the order of all hooks of `predict`")
def _(lab):
    return traced(lab, lambda trainer, module: trainer.predict(module, lab.loader()))
