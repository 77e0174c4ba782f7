"""The user's own optimizer, schedule, clipping and accumulation on two processes, against Lightning's single device."""

import functools

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from strategy_lab import (
    CLOSE,
    Dense,
    Lion,
    own_batches,
    quiet,
    state_of,
    trained,
    trained_alone,
    vectors,
)
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from olmoe_lightning import MoEStrategy


def simple(kind, module, **options):
    return kind(module.parameters(), **options)


def groups(module):
    return AdamW(
        [
            {"params": list(module.first.parameters()), "lr": 3e-2, "weight_decay": 0.5, "name": "first"},
            {"params": list(module.blocks.parameters()), "betas": (0.5, 0.6), "name": "blocks"},
            {"params": list(module.last.parameters()), "lr": 1e-3, "name": "last"},
        ],
        lr=1e-2,
        weight_decay=0.0,
    )


OPTIMIZERS = {
    "several groups": groups,
    "SGD with momentum": functools.partial(simple, SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad, whose state is made early": functools.partial(
        simple, Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.3
    ),
    "RMSprop": functools.partial(simple, RMSprop, lr=1e-2, momentum=0.5, centered=True),
    "AdamW fused": functools.partial(simple, AdamW, lr=1e-2, fused=True),
    "AdamW foreach": functools.partial(simple, AdamW, lr=1e-2, foreach=True),
    "AdamW amsgrad": functools.partial(simple, AdamW, lr=1e-2, amsgrad=True),
    "Lion of the user's own": functools.partial(simple, Lion, lr=1e-2),
}


def train(optimizer, steps=4, **options):
    return trained(Dense(optimizer), vectors(2 * steps * options.get("accumulate", 1)), **options)


def alone(optimizer, steps=4, **options):
    return trained_alone(Dense(optimizer), vectors(2 * steps * options.get("accumulate", 1)), **options)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_on_two_processes_equals_one(workers, kind):
    ours, _ = workers(2).run(train, OPTIMIZERS[kind])
    tolerance = CLOSE
    if "Lion" in kind:  # a sign turns where the average is zero up to rounding; those elements move by 2 lr then
        tolerance = CLOSE | {"atol": 1e-6}
    torch.testing.assert_close(ours, alone(OPTIMIZERS[kind]), **tolerance)


def lambda_lr(module):
    optimizer = groups(module)
    scheduler = LambdaLR(optimizer, [lambda step: 0.7**step, lambda step: 1 / (1 + step), lambda step: 1.0])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def one_cycle(module):
    optimizer = groups(module)
    scheduler = OneCycleLR(optimizer, max_lr=[0.03, 0.01, 0.02], total_steps=12)  # moves betas as well
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def plateau(module):
    optimizer = groups(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "seen"}}


def per_epoch(module):
    optimizer = groups(module)
    return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def logging_step(module, x, number):
    loss = module.loss(x)
    module.log("seen", loss, sync_dist=True, on_epoch=True, on_step=False)
    return loss


SCHEDULES = {
    "LambdaLR": lambda_lr,
    "OneCycleLR": one_cycle,
    "ReduceLROnPlateau": plateau,
    "LambdaLR per epoch": per_epoch,
}


def train_schedule(kind, strategy=None, devices=None, accumulate=1):
    module = Dense(SCHEDULES[kind], step=logging_step)
    trainer = quiet(strategy, devices=devices, accumulate_grad_batches=accumulate, max_epochs=3)
    trainer.fit(module, own_batches(vectors(6)))
    return state_of(trainer), [group["lr"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule_on_two_processes_equals_one(workers, kind):
    (ours, rates), (_, others) = workers(2).run(train_schedule, kind)
    state, expected = train_schedule(kind, "auto", devices=1, accumulate=2)
    assert rates == others == pytest.approx(expected)
    assert rates != [3e-2, 1e-2, 1e-3]
    torch.testing.assert_close(ours, state, **CLOSE)


def monitor(folder):
    trainer = quiet(callbacks=[LearningRateMonitor("step", log_weight_decay=True)], logger=CSVLogger(folder))
    trainer.fit(Dense(lambda_lr), own_batches(vectors(6)))
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "AdamW" in name}


def test_learning_rate_monitor_shows_the_real_groups(workers, tmp_path):
    first, second = workers(2).run(monitor, tmp_path)
    assert first == second
    assert first["lr-AdamW/first"] == pytest.approx(3e-2 * 0.7**2)
    assert first["lr-AdamW/blocks"] == pytest.approx(1e-2 / 3)
    assert first["lr-AdamW/first-weight_decay"] == 0.5


def find_rate(strategy):
    module = Dense(lambda module: AdamW(module.parameters(), lr=module.lr))
    module.lr = 1e-2
    trainer = quiet(strategy, devices=1, max_epochs=3)
    finder = Tuner(trainer).lr_find(module, own_batches(vectors(60)), num_training=20, update_attr=True)
    trainer.fit(module, own_batches(vectors(8)))
    return finder.suggestion(), trainer.optimizers[0].param_groups[0]["lr"], state_of(trainer)


def test_the_learning_rate_finder_leaves_no_trace_of_its_trial():
    ours, theirs = find_rate(MoEStrategy()), find_rate("auto")
    assert ours[:2] == theirs[:2]
    torch.testing.assert_close(ours[2], theirs[2], **CLOSE)


# ---------------------------------------------------------------------------------------------- windows


# AdamW's steps hardly depend on the size of the gradient, so that it would hide a wrong division.
momentum = functools.partial(simple, SGD, lr=0.05, momentum=0.9)


def by_hand(windows, clip=None, by_value=None):
    """A plain loop: each step descends along the mean gradient of its batches."""
    module = Dense()
    optimizer = momentum(module)
    for window in windows:
        optimizer.zero_grad()
        for x in window:
            (module.loss(x) / len(window)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        if by_value is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), by_value)
        optimizer.step()
    return module.state_dict()


def windows_of(batches, sizes):
    """Windows of 2 processes that accumulate so many batches each."""
    ends = [2 * sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [batches[end - 2 * size : end] for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize(("accumulate", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2])])
def test_the_last_window_of_an_epoch_counts_the_batches_it_has(workers, accumulate, sizes):
    ours, _ = workers(2).run(train, momentum, steps=5, accumulate=accumulate, limit_train_batches=5)
    torch.testing.assert_close(ours, by_hand(windows_of(vectors(10), sizes)), **CLOSE)


def train_rescheduled():
    scheduler = GradientAccumulationScheduler({0: 1, 1: 3})
    return trained(Dense(momentum), vectors(8), callbacks=[scheduler], max_epochs=2)


def test_accumulation_may_change_between_epochs(workers):
    ours, _ = workers(2).run(train_rescheduled)
    expected = by_hand(windows_of(vectors(8), [1] * 4) + windows_of(vectors(8), [3, 1]))
    torch.testing.assert_close(ours, expected, **CLOSE)


# ---------------------------------------------------------------------------------------------- clipping

WINDOWS = windows_of(vectors(8), [2, 2])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_equals_one_process(workers, algorithm):
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    ours, _ = workers(2).run(train, momentum, steps=2, accumulate=2, **options)
    expected = by_hand(WINDOWS, **{"clip" if algorithm == "norm" else "by_value": 0.02})
    torch.testing.assert_close(ours, expected, **CLOSE)
    assert not torch.allclose(expected["first.weight"], by_hand(WINDOWS)["first.weight"], **CLOSE)


class ClipsItself(Dense):
    """Overrides the hook in which Lightning lets a module clip."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.02, "norm")


def train_clipping_itself():
    return trained(ClipsItself(momentum), vectors(8), accumulate=2)


def test_a_module_may_clip_itself(workers):
    ours, _ = workers(2).run(train_clipping_itself)
    torch.testing.assert_close(ours, by_hand(WINDOWS, clip=0.02), **CLOSE)


class LooksAtGradients(Callback):
    """Keeps the norm of the gradients of the optimizer's parameters."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(sum(gradient.square().sum() for gradient in gradients) ** 0.5))


def train_looking():
    look = LooksAtGradients()
    state = trained(Dense(momentum), vectors(8), accumulate=2, gradient_clip_val=0.02, callbacks=[look])
    return state, look.norms


def test_on_before_optimizer_step_sees_the_mean_gradients_before_clipping(workers):
    (ours, norms), (_, others) = workers(2).run(train_looking)
    module = Dense()
    (sum(module.loss(x) for x in WINDOWS[0]) / 4).backward()
    expected = torch.stack([parameter.grad.norm() for parameter in module.parameters()]).norm()
    assert norms == others
    assert norms[0] == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(ours, by_hand(WINDOWS, clip=0.02), **CLOSE)
