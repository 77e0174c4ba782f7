"""Flags of the Trainer, precision, plugins, profilers, and the strategy's public methods."""

import torch
import torch.distributed as dist
from contract import row
from laboratory import SEVERAL, Ordinary
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner

GROUP = "Trainer, precision, plugins"


@row(GROUP, "`gradient_clip_val`, by norm", quick=True)
def _(lab):
    return lab.fit(gradient_clip_val=0.1)


@row(GROUP, "`gradient_clip_val`, by value")
def _(lab):
    return lab.fit(gradient_clip_val=0.01, gradient_clip_algorithm="value")


@row(GROUP, "clipping with accumulation")
def _(lab):
    return lab.fit(gradient_clip_val=0.1, accumulate_grad_batches=2)


@row(GROUP, "`detect_anomaly`")
def _(lab):
    return lab.fit(detect_anomaly=True)


@row(GROUP, "`deterministic`")
def _(lab):
    try:
        return lab.fit(deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


@row(GROUP, "`barebones`")
def _(lab):
    trainer = lab.trainer(barebones=True, log_every_n_steps=None, num_sanity_val_steps=None)
    trainer.fit(Ordinary(), lab.loader())
    return {"weights": lab.weights(trainer), "steps": trainer.global_step}


@row(GROUP, "`precision='32-true'`")
def _(lab):
    return lab.fit(precision="32-true") if not lab.column.narrow else lab.fit()


@row(GROUP, "`precision='bf16-mixed'`", {"PP 2": "declares float32"}, loose=True)
def _(lab):
    return lab.fit(precision="bf16-mixed")


@row(GROUP, "`precision='16-true'`", "needs a gradient scaler")
def _(lab):
    return lab.fit(precision="16-true")


@row(GROUP, "`precision='64-true'`", "keeps gradients and masters in float32")
def _(lab):
    return lab.fit(precision="64-true")


@row(GROUP, "`SimpleProfiler`, `AdvancedProfiler`, `PassThroughProfiler`")
def _(lab):
    simple = SimpleProfiler()
    found = lab.fit(profiler=simple)
    lab.fit(profiler=AdvancedProfiler(dirpath=lab.folder, filename="advanced"))
    lab.fit(profiler=PassThroughProfiler())
    steps = [action for action in simple.recorded_durations if action.endswith("training_step")]
    return {"actions": len(steps), **found}


@row(GROUP, "`Tuner.scale_batch_size`", dict.fromkeys(SEVERAL, "not supported with distributed strategies"))
def _(lab):
    class Sized(Ordinary):
        batch_size = 2

        def train_dataloader(self):
            return lab.loader(4)

        def val_dataloader(self):
            return lab.loader(1)

    module, trainer = Sized(), lab.trainer(max_steps=4)
    size = Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=1)
    return {"size": size}


@row(GROUP, "`Tuner.lr_find`")
def _(lab):
    module, trainer = Ordinary(), lab.trainer(max_epochs=4)
    finder = Tuner(trainer).lr_find(module, lab.loader(8), num_training=12, min_lr=1e-4, max_lr=1e-1)
    return {"rates": finder.results["lr"], "set": module.lr == finder.suggestion(), "one rate": lab.agreed(module.lr)}


@row(GROUP, "the plugin `TorchSyncBatchNorm`, and no batch normalisation")
def _(lab):
    return lab.fit(**({} if lab.plain else {"plugins": [*lab.plugins(), TorchSyncBatchNorm()]}))


@row(GROUP, "`strategy.broadcast`, `barrier`, `reduce`, `all_gather`, `reduce_boolean_decision`")
def _(lab):
    found = {}

    class Talks(Ordinary):
        def on_train_start(self):
            strategy = self.trainer.strategy
            strategy.barrier("here")
            found["broadcast"] = strategy.broadcast({"rank": self.global_rank})
            found["mean"] = strategy.reduce(torch.tensor(3.0), reduce_op="mean")
            found["sum"] = strategy.reduce(torch.tensor(3.0), reduce_op="sum") / self.trainer.world_size
            found["gathered"] = self.all_gather(torch.tensor([1.0, 2.0])).reshape(-1, 2)[0]
            found["decided"] = strategy.reduce_boolean_decision(self.global_rank == 0, all=False)

    return {**lab.fit(Talks()), **found}


@row(GROUP, "`self.all_gather` with gradients")
def _(lab):
    found = {}

    class Gathers(Ordinary):
        def on_train_start(self):
            x = torch.ones(2, requires_grad=True)
            self.all_gather(x, sync_grads=True).sum().backward()
            found["gradient"] = x.grad / self.trainer.world_size

    return {**lab.fit(Gathers()), **found}


@row(GROUP, "`trainer.world_size`, ranks, `is_global_zero`, `num_training_batches`, `estimated_stepping_batches`")
def _(lab):
    found = {}

    class Counts(Ordinary):
        def on_train_start(self):
            trainer = self.trainer
            found["zero"] = trainer.is_global_zero == (lab.rank == 0)
            found["rank"] = trainer.global_rank == lab.rank
            found["world"] = trainer.world_size == lab.column.processes
            found["batches"] = (trainer.num_training_batches, trainer.num_val_batches)
            found["steps"] = trainer.estimated_stepping_batches

    lab.fit(Counts(), max_epochs=2, accumulate_grad_batches=2, val=lab.loader(2))
    return found


@row(GROUP, "`Trainer(strategy='moe')`")
def _(lab):
    options = {} if lab.plain or lab.column.options else {"strategy": "moe"}
    return lab.fit(**options)


@row(GROUP, "a process group that is there stays")
def _(lab):
    before = dist.is_initialized()
    return {**lab.fit(), "there": dist.is_initialized() == before}
