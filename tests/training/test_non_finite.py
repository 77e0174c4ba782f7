"""Losses and gradients that are not finite: one decision on all ranks, before anything has changed."""

import pytest
import torch
from lightning.pytorch import Callback
from strategy_lab import (
    SMALL_BUCKETS,
    Dense,
    language_model,
    own_batches,
    quiet,
    rank_and_size,
    same,
    sentences,
    state_of,
    vectors,
)
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from olmoe_lightning import MoEStrategy
from olmoe_lightning.strategy import NonFiniteError


def scheduled(module):
    optimizer = AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Poison(torch.autograd.Function):
    """The identity, with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def nan_loss(module, x, number):
    return module.loss(x) * (float("nan") if number == 1 and rank_and_size()[0] == 1 else 1.0)


def infinite_gradient(module, x, number):
    if number == 1 and rank_and_size()[0] == 1:
        return (module.last(module.blocks(Poison.apply(module.first(x)))) ** 2).mean()
    return module.loss(x)


class Watch(Callback):
    """Everything that a step can change, after each step."""

    def __init__(self):
        self.states, self.rates, self.skipped = [], [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        optimizer = trainer.optimizers[0]
        state = {f"weight {name}": value.clone() for name, value in pl_module.state_dict().items()}
        for number, entries in enumerate(optimizer.state.values()):
            state |= {f"{key} {number}": torch.as_tensor(value).clone() for key, value in entries.items()}
        self.states.append(state)
        self.rates.append([group["lr"] for group in optimizer.param_groups])
        self.skipped.append(trainer.strategy.skipped_steps)


def train(step, on_non_finite="skip", batches=8, accumulate=1):
    watch = Watch()
    strategy = MoEStrategy(on_non_finite=on_non_finite, bucket_megabytes=SMALL_BUCKETS)
    trainer = quiet(strategy, callbacks=[watch], accumulate_grad_batches=accumulate)
    trainer.fit(Dense(scheduled, step=step), own_batches(vectors(batches)))
    return watch, state_of(trainer), dict(trainer.callback_metrics)


@pytest.mark.parametrize("step", [nan_loss, infinite_gradient])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(workers, step):
    for watch, _, metrics in workers(2).run(train, step):
        assert same(watch.states[0], watch.states[1])  # weights, moments and step counters
        assert watch.rates[0] == watch.rates[1] == [0.5e-2]
        assert watch.skipped == [0, 1, 1, 1]
        assert metrics["skipped_steps"] == 1
        assert not same(watch.states[1], watch.states[2])
        assert watch.rates[3] == [0.125e-2]  # three steps were taken


def train_without_the_second(steps):
    batches = vectors(8)
    watch = Watch()
    trainer = quiet(callbacks=[watch])
    trainer.fit(Dense(scheduled), own_batches(batches[:2] + batches[4:]))
    return watch.states


def test_after_a_skipped_step_the_run_is_the_one_that_never_had_the_batch(workers):
    skipped = workers(2).run(train, nan_loss)
    clean = workers(2).run(train_without_the_second, 3)
    for (watch, _, _), states in zip(skipped, clean, strict=True):
        assert same(watch.states[-1], states[-1])


def test_one_bad_microbatch_spoils_its_whole_window_and_no_other(workers):
    for watch, _, _ in workers(2).run(train, nan_loss, accumulate=2):
        assert watch.skipped == [0, 1, 1, 1]
        assert watch.rates[-1] == [0.5e-2]


def train_raising(step):
    try:
        train(step, on_non_finite="raise")
    except NonFiniteError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("step", "what"), [(nan_loss, "the loss of 1 microbatches"), (infinite_gradient, "the global gradient norm is")]
)
def test_raise_stops_all_ranks_with_the_same_error(workers, step, what):
    first, second = workers(2).run(train_raising, step)
    for rank, message in enumerate((first, second)):
        assert message.startswith(f"optimizer step 1: {what}")
        assert f"rank {rank} of 2" in message
    assert "first.weight" in first + second


def train_language_model(spoil, expert_parallel_size):
    class Spoiled(type(language_model())):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            if spoil and batch_idx == 1 and rank_and_size()[0] == 1:
                output["loss"] = output["loss"] * float("nan")
            return output

    watch = Watch()
    strategy = MoEStrategy(expert_parallel_size=expert_parallel_size, bucket_megabytes=SMALL_BUCKETS)
    trainer = quiet(strategy, callbacks=[watch])
    module = Spoiled(language_model().config, learning_rate=1e-2, schedule="constant")
    batches = sentences(6)
    trainer.fit(module, own_batches(batches if spoil else batches[:2] + batches[4:]))
    return watch.states


@pytest.mark.parametrize("expert_parallel_size", [1, 2])
def test_a_skipped_step_leaves_the_routers_selection_bias(workers, expert_parallel_size):
    spoiled = workers(2).run(train_language_model, True, expert_parallel_size)
    clean = workers(2).run(train_language_model, False, expert_parallel_size)
    for states, others in zip(spoiled, clean, strict=True):
        bias = next(name for name in states[0] if name.endswith("selection_bias"))
        assert states[0][bias].any()
        assert same(states[0], states[1])
        assert same(states[2], others[1])


def per_epoch(module):
    optimizer = AdamW(module.parameters(), lr=1e-2)
    return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def last_batch_is_bad(module, x, number):
    return module.loss(x) * (float("nan") if number == 3 and module.current_epoch == 0 else 1.0)


def train_epochs():
    trainer = quiet(max_epochs=2)
    trainer.fit(Dense(per_epoch, step=last_batch_is_bad), own_batches(vectors(8)))
    return trainer.optimizers[0].param_groups[0]["lr"], trainer.strategy.skipped_steps


def test_a_schedule_of_epochs_goes_on_when_the_last_step_of_one_was_skipped(workers):
    assert workers(2).run(train_epochs) == [(0.25e-2, 1)] * 2
