"""What cannot work is refused with its numbers, before any process group exists."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from strategy_lab import Dense, WithExperts, language_model, own_batches, quiet, sentences, vectors

from olmoe_lightning import MoEStrategy


def refusal(options, make=Dense, trainer_options=None, batches=vectors, change=None):
    """The error of a fit on two processes, and whether the processes had met before it."""
    met = []

    class Meets(MoEStrategy):
        def _connect_processes(self):
            met.append(True)
            super()._connect_processes()

    try:
        module = make()
        if change:
            setattr(module, *change)
        trainer_options = dict(trainer_options or {})
        kind = trainer_options.get("callbacks")
        if isinstance(kind, type):  # some of Lightning's cannot be pickled
            trainer_options["callbacks"] = [kind(0.1) if kind is StochasticWeightAveraging else kind()]
        quiet(Meets(**options), **trainer_options).fit(module, own_batches(batches(4)))
    except (ValueError, MisconfigurationException, TypeError) as error:
        return f"{type(error).__name__}: {error}", bool(met)
    return "accepted", bool(met)


def check(workers, words, *args, before_meeting=True, **kwargs):
    for message, met in workers(2).run(refusal, *args, **kwargs):
        for word in words:
            assert word in message
        assert not (before_meeting and met)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert_parallel_size": 0}, ["expert_parallel_size (0) must be at least 1"]),
        ({"expert_parallel_size": 3}, ["number of processes (2) must be divisible by", "expert_parallel_size (3)"]),
        ({"on_non_finite": "ignore"}, ["on_non_finite ('ignore')", "'skip' or 'raise'"]),
        ({"bucket_megabytes": 0}, ["bucket_megabytes (0) must be positive"]),
    ],
)
def test_sizes_and_options_out_of_range(workers, options, words):
    check(workers, words, options)


def three_experts():
    module = language_model()
    return type(module)(module.config.replace(num_experts=3))


def test_experts_that_cannot_be_shared_evenly(workers):
    check(
        workers,
        ["num_experts (3) must be divisible by expert_parallel_size (2)"],
        {"expert_parallel_size": 2},
        three_experts,
    )


def somebody_elses_three_experts():
    module = WithExperts()
    module.moe = type(module.moe)(module.moe.config.replace(num_experts=3))
    return module


def test_experts_inside_of_somebody_elses_module_that_cannot_be_shared_evenly(workers):
    check(
        workers,
        ["num_experts (3) must be divisible by", "(2)"],
        {"expert_parallel_size": 2},
        somebody_elses_three_experts,
        before_meeting=False,  # they are found when the module is placed
    )


def test_manual_optimization(workers):
    words = ["automatic optimization", "self.automatic_optimization = False", "`ddp`"]
    check(workers, words, {}, change=("automatic_optimization", False))


@pytest.mark.parametrize(("comm", "words"), [("all_to_al", ["all_to_all"]), ("deepep", ["local"]), (7, ["all_to_all"])])
def test_unknown_comm_names_the_alternatives(workers, comm, words):
    check(workers, ["comm", str(comm), *words], {"comm": comm}, language_model, batches=sentences)


class FailsToBuild(type(language_model())):
    """Its experts cannot be shared, which is found when the network is there without memory."""

    def built(self):
        self.config = self.config.replace(num_experts=3)
        return super().built()


def fails_to_build():
    return FailsToBuild(language_model().config)


def test_an_error_while_building_is_not_hidden_by_another_one(workers):
    words = ["UserError: ", "num_experts (3) must be divisible by"]
    check(workers, words, {"expert_parallel_size": 2}, fails_to_build, batches=sentences, before_meeting=False)


class Backbone(Dense):
    @property
    def backbone(self):
        return self.blocks


@pytest.mark.parametrize("kind", [StochasticWeightAveraging, EMAWeightAveraging, BackboneFinetuning])
def test_callbacks_that_change_weights_behind_the_optimizer(workers, kind):
    words = [kind.__name__, "cannot be used with MoEStrategy"]
    check(workers, words, {}, Backbone, {"callbacks": kind}, before_meeting=False)


class AddsAGroup(Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


def test_parameters_that_are_given_to_the_optimizer_during_training(workers):
    words = ["groups had [", "parameters when training began and have [", "configure_optimizers"]
    check(workers, words, {}, trainer_options={"callbacks": [AddsAGroup()]}, before_meeting=False)


class Unfreezes(Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        pl_module.first.requires_grad_(True)


def frozen():
    return Dense(change=lambda module: module.first.requires_grad_(False))


def test_parameters_that_are_unfrozen_during_training(workers):
    """They would be left as they are without a word: the optimizer holds no part of them."""
    words = ["first.weight", "frozen"]
    check(workers, words, {}, frozen, trainer_options={"callbacks": [Unfreezes()]}, before_meeting=False)


def third_party():
    return Dense(lambda module: torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))


def test_parameters_that_are_not_the_modules(workers):
    check(workers, ["optimizer holds 1 parameters that are not"], {}, third_party, before_meeting=False)


def no_loss():
    return Dense(step=lambda module, x, number: {"output": module.loss(x)})


def a_number():
    return Dense(step=lambda module, x, number: 1.5)


@pytest.mark.parametrize("make", [no_loss, a_number])
def test_a_step_without_a_loss_gets_lightnings_own_explanation(workers, make):
    check(workers, ["In automatic"], {}, make, before_meeting=False)
