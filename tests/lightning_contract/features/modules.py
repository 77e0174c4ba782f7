"""What a module may be and do."""

import copy

import torch
from contract import row
from laboratory import Early, Ordinary
from torch import nn

GROUP = "Modules"


@row(GROUP, "layers in `configure_model`", quick=True)
def _(lab):
    return lab.fit()


@row(
    GROUP,
    "layers in `__init__`",
    {"PP 2": "are trained by several stages of the pipeline, each its own copy"},
    quick=True,
)
def _(lab):
    return lab.fit(Early())


@row(
    GROUP,
    "`training_step` returns a tensor",
    {"PP 2": "without 'num_tokens', but the pipeline has differentiated the sum"},
)
def _(lab):
    class Bare(Ordinary):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"]

    return lab.fit(Bare())


@row(GROUP, "`training_step` returns more than the loss")
def _(lab):
    seen = []

    class More(Ordinary):
        def training_step(self, batch, batch_idx):
            return {**super().training_step(batch, batch_idx), "index": batch_idx}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((outputs["index"], float(outputs["loss"]) > 0))

    return {**lab.fit(More()), "seen": seen}


@row(GROUP, "`toggled` layers: parameters frozen before the fit")
def _(lab):
    class Frozen(Ordinary):
        def configure_model(self):
            super().configure_model()
            for layer in {"0", "2"} & self.layers.keys():
                self.layers[layer].requires_grad_(False)

    return lab.fit(Frozen())


@row(GROUP, "`freeze` and `unfreeze`")
def _(lab):
    module = Ordinary()
    trainer = lab.trainer()
    trainer.fit(module, lab.loader())
    module.freeze()
    module.unfreeze()
    return {**lab.seen(trainer), "trained": all(parameter.requires_grad for parameter in module.parameters())}


@row(GROUP, "`forward` of a module behind its fit", dict.fromkeys(("EP 2", "bf16"), "reaches the others only in fit"))
def _(lab):
    module = Ordinary()
    lab.fit(module)
    with torch.no_grad():
        return {"output": module(torch.ones(8, 8)).float()}


@row(GROUP, "a deep copy of the module trains as it does")
def _(lab):
    return lab.fit(copy.deepcopy(Ordinary(lr=0.05)))


@row(GROUP, "buffers that the module counts in")
def _(lab):
    class Counting(Ordinary):
        def __init__(self):
            super().__init__()
            self.register_buffer("batches", torch.tensor(0))

        def training_step(self, batch, batch_idx):
            self.batches += 1
            return super().training_step(batch, batch_idx)

    return lab.fit(Counting())


@row(GROUP, "`on_save_checkpoint`, `on_load_checkpoint`, `state_dict` of a module")
def _(lab):
    seen = []

    class Adds(Ordinary):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["added"] = 5

        def on_load_checkpoint(self, checkpoint):
            seen.append(checkpoint["added"])

    trainer = lab.trainer()
    trainer.fit(Adds(), lab.loader())
    trainer.save_checkpoint(lab.folder / "run.ckpt")
    return {**lab.fit(Adds(), max_epochs=2, ckpt_path=lab.folder / "run.ckpt"), "seen": seen}


@row(GROUP, "an exception on all processes, and what hooks see of it")
def _(lab):
    class Fails(Ordinary):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ZeroDivisionError("in batch 2")
            return super().training_step(batch, batch_idx)

    try:
        lab.fit(Fails())
    except ZeroDivisionError as error:
        return {"error": str(error)}
    return {"error": "none"}


@row(GROUP, "`torch.compile` of a layer")
def _(lab):
    class Compiled(Ordinary):
        def configure_model(self):
            fresh = not self.layers
            super().configure_model()
            if fresh and "1" in self.layers:
                self.layers["1"].compile(backend="eager")

    return lab.fit(Compiled())


@row(GROUP, "`self.trainer`, `self.global_step`, `self.current_epoch`, `self.device`")
def _(lab):
    seen = []

    class Looks(Ordinary):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((self.global_step, self.current_epoch, str(self.device), self.trainer.is_last_batch))

    return {**lab.fit(Looks(), max_epochs=2), "seen": seen}


@row(GROUP, "`backward` overridden", {"PP 2": "overrides backward, but a pipeline makes gradients in pipeline_step"})
def _(lab):
    class Backs(Ordinary):
        def backward(self, loss, *args, **kwargs):
            loss.backward(*args, **kwargs)

    return lab.fit(Backs())


@row(GROUP, "a shared parameter: one layer at two places")
def _(lab):
    class Shared(Ordinary):
        def configure_model(self):
            fresh = not self.layers
            super().configure_model()
            if fresh and "1" in self.layers:
                self.layers["1"].append(self.layers["1"][0])

    return lab.fit(Shared())


@row(GROUP, "a parameter that no loss uses")
def _(lab):
    class Unused(Ordinary):
        def configure_model(self):
            fresh = not self.layers
            super().configure_model()
            if fresh and "3" in self.layers:
                self.layers["3"].register_parameter("unused", nn.Parameter(torch.ones(3)))

    return lab.fit(Unused())


@row(GROUP, "`train()` and `eval()` of parts stay as the user set them")
def _(lab):
    flags = []

    class Evals(Ordinary):
        def on_train_start(self):
            for layer in {"1"} & self.layers.keys():
                self.layers[layer].eval()

        def on_validation_end(self):
            flags.append(all(part.training for name, part in self.layers.items() if name != "1"))

    found = lab.fit(Evals(), val=lab.loader(1, first=1), max_epochs=2)
    return {**found, "flags": flags}


@row(GROUP, "`configure_sharded_model`")
def _(lab):
    class Old(Ordinary):
        def configure_sharded_model(self):
            self.configure_model()

    try:
        return lab.fit(Old())
    except Exception as error:
        return {"error": type(error).__name__}
