"""Optimizers, their groups, and learning-rate schedules."""

import torch
from contract import row
from laboratory import SEVERAL, Ordinary
from torch.optim import lr_scheduler as lrs

GROUP = "Optimizers"
SCHEDULES = "Learning-rate schedules"


def with_optimizer(make):
    class Chosen(Ordinary):
        def configure_optimizers(self):
            return make(self)

    return Chosen()


def add_optimizer(name, make, refused="", **options):
    @row(GROUP, f"`{name}`", refused)
    def _(lab):
        return lab.fit(with_optimizer(lambda module: make(module.parameters())), **options)


OPTIMIZERS = {
    "SGD(momentum, nesterov, weight_decay)": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    # Adam's division by tiny second moments makes much of the rounding of gradients: eps bounds it.
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3),
    "AdamW(amsgrad)": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
}
for NAME, MAKE in OPTIMIZERS.items():
    add_optimizer(NAME, MAKE)
add_optimizer("LBFGS", lambda p: torch.optim.LBFGS(p, lr=0.1), dict.fromkeys(SEVERAL, "LBFGS"))
add_optimizer(
    "Adafactor",
    lambda p: torch.optim.Adafactor(p, lr=0.1),
    dict.fromkeys(("DP 2", "EP 2", "bf16"), "Adafactor"),
)


@row(GROUP, "several parameter groups with options of their own")
def _(lab):
    def make(module):
        biases = [p for name, p in module.named_parameters() if "bias" in name]
        rest = [p for name, p in module.named_parameters() if "bias" not in name]
        return torch.optim.SGD([{"params": biases, "lr": 0.2}, {"params": rest, "weight_decay": 0.1}], lr=0.05)

    return lab.fit(with_optimizer(make))


@row(GROUP, "a group without parameters that are trained")
def _(lab):
    def make(module):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(("layers.0", "layers.3")))
        frozen = [p for p in module.parameters() if not p.requires_grad]
        rest = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.SGD([{"params": rest, "weight_decay": 0.1}, {"params": frozen}], lr=0.05)

    return lab.fit(with_optimizer(make))


@row(GROUP, "`configure_optimizers` returns `None`")
def _(lab):
    return lab.fit(with_optimizer(lambda module: None))


@row(GROUP, "`configure_optimizers` returns lists, or a dictionary")
def _(lab):
    as_list = lab.fit(with_optimizer(lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)]))
    as_dict = lab.fit(with_optimizer(lambda module: {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}))
    return {**as_list, "of dictionary": as_dict["weights"]}


@row(GROUP, "several optimizers", "multiple optimizers is only supported with manual optimization")
def _(lab):
    class Two(Ordinary):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    return lab.fit(Two())


@row(GROUP, "manual optimization, `toggle_optimizer`, `manual_backward`", "needs automatic optimization")
def _(lab):
    class Manual(Ordinary):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.mean(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    return lab.fit(Manual())


@row(GROUP, "`optimizer_step` overridden: warm-up by hand")
def _(lab):
    class Warms(Ordinary):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * (self.trainer.global_step + 1) / 4
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    return lab.fit(Warms())


@row(GROUP, "`optimizer_zero_grad` overridden")
def _(lab):
    class Zeroes(Ordinary):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    return lab.fit(Zeroes())


@row(GROUP, "`configure_gradient_clipping` overridden")
def _(lab):
    class Clips(Ordinary):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, 0.05 if self.trainer.global_step > 1 else 0.1, "norm")

    return lab.fit(Clips())


@row(GROUP, "`clip_grad_norm_` in `configure_gradient_clipping`", dict.fromkeys(("EP 2", "PP 2", "bf16"), "grad_norm"))
def _(lab):
    class Clips(Ordinary):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    return lab.fit(Clips())


@row(GROUP, "a hook of a parameter scales its gradient")
def _(lab):
    class Hooked(Ordinary):
        def configure_model(self):
            fresh = not self.layers
            super().configure_model()
            for name, parameter in self.named_parameters() if fresh else ():
                if name.startswith(("layers.1", "layers.3")):
                    parameter.register_hook(lambda grad: grad * 0.25)

    return lab.fit(Hooked())


@row(GROUP, "`self.optimizers()`, `self.lr_schedulers()`")
def _(lab):
    found = {}

    class Looks(Ordinary):
        def on_train_start(self):
            optimizer = self.optimizers()
            found["wrapped"] = type(optimizer).__name__
            found["lr"] = [group["lr"] for group in optimizer.param_groups]
            found["none"] = self.lr_schedulers() is None

    return {**lab.fit(Looks()), **found}


def scheduled(lab, make, interval="step", val=None, max_epochs=2, **config):
    rates = []

    class Scheduled(Ordinary):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)
            scheduler = {"scheduler": make(optimizer), "interval": interval, **config}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    return {**lab.fit(Scheduled(), max_epochs=max_epochs, val=val), "rates": rates}


def add_schedule(name, make, interval="step", **config):
    @row(SCHEDULES, f"`{name}`, each {interval}")
    def _(lab):
        return scheduled(lab, make, interval, **config)


for NAME, MAKE in {
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 4], 0.5),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=10),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1), lrs.ExponentialLR(o, 0.9)], [3]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1), lrs.ExponentialLR(o, 0.9)]),
}.items():
    add_schedule(NAME, MAKE)
add_schedule("StepLR", lambda o: lrs.StepLR(o, 1, 0.5), "epoch")
add_schedule("SWALR", lambda o: torch.optim.swa_utils.SWALR(o, 0.02, anneal_epochs=2), "epoch", max_epochs=3)


@row(SCHEDULES, "`ReduceLROnPlateau` on a validation metric")
def _(lab):
    return scheduled(
        lab,
        lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=10.0),
        "epoch",
        val=lab.loader(1, first=1),
        max_epochs=3,
        monitor="val_loss",
    )


@row(SCHEDULES, "`frequency=2`")
def _(lab):
    return scheduled(lab, lambda o: lrs.ExponentialLR(o, 0.5), frequency=2)


@row(SCHEDULES, "a schedule under accumulation")
def _(lab):
    class Scheduled(Ordinary):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": lrs.ExponentialLR(optimizer, 0.5), "interval": "step"}]

    return lab.fit(Scheduled(), accumulate_grad_batches=2, max_epochs=2)


@row(SCHEDULES, "`lr_scheduler_step` overridden")
def _(lab):
    class Steps(Ordinary):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": lrs.ExponentialLR(optimizer, 0.5), "interval": "step"}]

        def lr_scheduler_step(self, scheduler, metric):
            if self.trainer.global_step % 2:
                scheduler.step()

    return lab.fit(Steps())
