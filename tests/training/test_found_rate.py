"""A learning rate that was found is that of all later steps, as if the module had been made with it."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from strategy_lab import CLOSE, Dense, Items, language_model, quiet, sentences, state_of, vectors
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy

SCHEDULES = {
    "none": None,
    "lambda": lambda o, rate: schedules.LambdaLR(o, lambda step: (step + 1) / 4),
    "cosine": lambda o, rate: schedules.CosineAnnealingLR(o, 10),
    "one cycle": lambda o, rate: schedules.OneCycleLR(o, [3 * rate, rate], 20),
    "sequence": lambda o, rate: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.5, 1.0, 2), schedules.ExponentialLR(o, 0.9)], [2]
    ),
    "chain": lambda o, rate: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.5, 2), schedules.StepLR(o, 2)]),
}


def optimizers(module, schedule):
    first, *others = module.parameters()
    groups = [{"params": [first], "lr": 3 * module.learning_rate}, {"params": others}]
    optimizer = AdamW(groups, lr=module.learning_rate)
    if SCHEDULES[schedule] is None:
        return optimizer
    scheduler = SCHEDULES[schedule](optimizer, module.learning_rate)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rates(Callback):
    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen.append([group["lr"] for group in optimizer.param_groups])


def batches(module):
    items = vectors(40) if isinstance(module, Dense) else sentences(40)
    return DataLoader(Items(items), batch_size=None)  # the same on each rank


def made_with(rate, schedule):
    if schedule == "of the model":
        return language_model(learning_rate=rate, schedule="cosine", warmup_steps=2, expert_lr_multiplier=0.5)
    module = Dense(lambda module: optimizers(module, schedule))
    module.learning_rate = rate
    return module


def find_and_train(how, schedule="lambda", rate=4e-4, **options):
    """The rate found, those of the steps behind it, and the weights."""
    module = made_with(rate, schedule)
    rates = Rates()
    finder = [LearningRateFinder(max_lr=5e-3, num_training_steps=30)] if how == "callback" else []
    strategy = "auto" if how == "plain" else MoEStrategy(**options)
    trainer = quiet(strategy, callbacks=[rates, *finder], max_epochs=-1, max_steps=6)
    if how in ("plain", "tuner"):
        Tuner(trainer).lr_find(module, batches(module), max_lr=5e-3, num_training=30)
    trainer.fit(module, batches(module))
    return module.learning_rate, rates.seen, state_of(trainer)


def compare(ours, theirs):
    assert ours[0] == theirs[0] != 4e-4
    assert len(ours[1]) == 6
    assert ours[1] == [pytest.approx(rates) for rates in theirs[1]]
    torch.testing.assert_close(ours[2], theirs[2], **CLOSE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_found_by_the_callback_is_that_of_a_module_made_with_it(schedule):
    compare(find_and_train("callback", schedule), find_and_train("plain", schedule))


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("lambda", {}),
        ("one cycle", {"shard_optimizer": False}),
        ("of the model", {"expert_parallel_size": 2}),
        ("of the model", {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    ],
)
def test_all_processes_go_on_with_the_rate_of_one(schedule, options, workers):
    alone = find_and_train("plain", schedule)
    found = workers(2).run(find_and_train, "callback", schedule, **options)
    made_so = workers(2).run(find_and_train, "no search", schedule, alone[0], **options)
    for (rate, rates, weights), (_, _, expected) in zip(found, made_so, strict=True):
        assert rate == alone[0]
        assert rates == [pytest.approx(each) for each in alone[1]]
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-9)


def test_lightning_alone_forgets_the_rate_at_the_second_step():
    """Else the tests above would compare nothing."""
    module, rates = made_with(4e-4, "lambda"), Rates()
    finder = LearningRateFinder(max_lr=5e-3, num_training_steps=30)
    quiet("auto", devices=1, callbacks=[rates, finder], max_epochs=-1, max_steps=2).fit(module, batches(module))
    assert rates.seen[0][0] == rates.seen[0][1] == module.learning_rate
    assert rates.seen[1] == [pytest.approx(3 * 4e-4 / 2), pytest.approx(4e-4 / 2)]


class Sized(Dense):
    def __init__(self):
        super().__init__(lambda module: SGD(module.parameters(), lr=1e-3))
        self.batch_size = 2

    def train_dataloader(self):
        return DataLoader(Items(list(torch.cat(vectors(16)))), batch_size=self.batch_size)


@pytest.mark.parametrize("how", ["tuner", "callback"])
def test_a_batch_size_is_found_and_the_trial_leaves_no_trace(how, workers):
    def find(strategy):
        module = Sized()
        finder = [BatchSizeFinder(steps_per_trial=1, max_trials=2)] if how == "callback" else []
        trainer = quiet(strategy, devices=1, callbacks=finder, max_steps=3)
        if how == "tuner":
            Tuner(trainer).scale_batch_size(module, steps_per_trial=1, max_trials=2)
        trainer.fit(module)
        return module.batch_size, state_of(trainer)

    (ours, weights), (theirs, expected) = find(MoEStrategy()), find("auto")
    assert ours == theirs > 2
    torch.testing.assert_close(weights, expected, **CLOSE)
