"""Weights that a user sets are the weights: in every precision, on any number of processes, at any time of a run."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy_lab import (
    CLOSE,
    SMALL_BUCKETS,
    Convolutions,
    Dense,
    Recorder,
    WithExperts,
    copy_of,
    images,
    own_batches,
    quiet,
    same,
    state_of,
    trained,
    vectors,
)
from test_pipeline import Chain, every_batch, strategy
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.plugins import BF16Precision


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def clamp(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.clamp_(-0.1, 0.1)


def clamp_data(module):
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def rebind(module):
    for parameter in module.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def load(module):
    module.load_state_dict({name: value.clamp(-0.1, 0.1) for name, value in module.state_dict().items()})


CLAMPED = 0.10035
"""What bf16 rounds to the number that it has for 0.1: masters stay exact where the weight is as it was."""
WAYS = {way.__name__: way for way in (clamp, clamp_data, rebind, load)}


class In(Callback):
    """Sets weights in one hook."""

    def __init__(self, hook, way):
        setattr(self, hook, lambda trainer, pl_module, *_: WAYS[way](pl_module))


HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_sanity_check_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_train_epoch_start",
    "on_validation_end",
    "on_train_end",
]


class Evaluated(Dense):
    """Sums its validation losses."""

    def __init__(self, **options):
        super().__init__(momentum, **options)
        self.losses = []

    def validation_step(self, batch, batch_idx):
        self.losses.append(float(self.loss(batch)))


def pairs(count=4):
    """What two processes see together."""
    batches = vectors(count)
    return [torch.cat(batches[index : index + 2]) for index in range(0, count, 2)]


def evaluated(chosen, batches, hook=None, way=None, devices=None, **options):
    """Weights, and losses of validation: before and after each epoch, and after the fit."""
    module = Evaluated()
    callbacks = [In(hook, way)] if hook else []
    trainer = quiet(chosen, devices, max_epochs=2, num_sanity_val_steps=1, callbacks=callbacks, **options)
    every = DataLoader(vectors(1), batch_size=None)
    trainer.fit(module, own_batches(batches), every)
    state = state_of(trainer)
    trainer.validate(module, every, verbose=False)
    return state, module.losses, copy_of(module)


def evaluated_by_us(hook, way, options, narrow=False):
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS, **options)
    return evaluated(chosen, vectors(4), hook, way, plugins=[BF16Precision()] if narrow else [])


def alone(hook=None, way=None):
    return evaluated("auto", pairs(), hook, way, devices=1)


MODES = {"sharded": {}, "replicated": {"shard_optimizer": False}}
CASES = [(hook, "clamp_data", "sharded") for hook in HOOKS]
CASES += [("on_train_batch_end", way, mode) for way in WAYS for mode in MODES]


@pytest.mark.parametrize(("hook", "way", "mode"), CASES)
def test_weights_set_in_a_hook_are_those_of_one_process(workers, hook, way, mode):
    state, losses, after = alone(hook, way)
    for ours, found, left in workers(2).run(evaluated_by_us, hook, way, MODES[mode]):
        torch.testing.assert_close(ours, state, **CLOSE)
        torch.testing.assert_close(left, after, **CLOSE)
        assert found == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("hook", HOOKS)
def test_setting_them_changes_the_run(hook):
    """Negative control."""
    (state, losses, _), (other, without, _) = alone(hook, "clamp_data"), alone()
    assert not torch.allclose(state["first.weight"], other["first.weight"], **CLOSE)
    assert losses != without


@pytest.mark.parametrize(("hook", "way", "mode"), CASES)
def test_narrow_weights_follow_what_is_set(workers, hook, way, mode):
    """bf16 rounds to a 256th; a change that is lost is ten times larger."""
    state, losses, _ = alone(hook, way)
    for ours, found, left in workers(2).run(evaluated_by_us, hook, way, MODES[mode], True):
        torch.testing.assert_close(ours, state, rtol=0.02, atol=0.004)
        assert same(left, ours)
        assert found == pytest.approx(losses, rel=0.05)


# ---------------------------------------------------------------------------------------------- between runs


def load_after_fit(processes):
    """Other weights after a fit, then validate, twice, then a fit without a step."""
    module = Evaluated()
    trainer = quiet(plugins=[BF16Precision()], devices=processes)
    trainer.fit(module, own_batches(vectors(4)))
    other = {name: torch.randn_like(value) for name, value in seeded(module).items()}
    module.load_state_dict(other)
    kept = []
    for _ in range(2):
        trainer.validate(module, DataLoader(vectors(1), batch_size=None), verbose=False)
        kept.append(copy_of(module))
    quiet(plugins=[BF16Precision()], devices=processes, limit_train_batches=0).fit(module, own_batches(vectors(4)))
    kept.append(copy_of(module))
    return other, kept, module.losses


def seeded(module):
    torch.manual_seed(1)
    return module.state_dict()


def test_weights_loaded_after_a_narrow_fit_stay(workers):
    for other, kept, losses in [*workers(2).run(load_after_fit, 2), load_after_fit(1)]:
        assert all(same(each, other) for each in kept)
        module = Evaluated()
        module.load_state_dict(other)
        assert losses == pytest.approx([module.loss(vectors(1)[0]).item()] * 2, rel=0.05)


def test_an_evaluation_gives_a_module_back_as_it_was():
    module = Evaluated()
    before = copy_of(module)
    quiet(plugins=[BF16Precision()], devices=1).validate(module, DataLoader(vectors(1), batch_size=None), verbose=False)
    assert same(copy_of(module), before)


class PartlyFrozen(Convolutions):
    """With running statistics and a layer that is not trained."""

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)


def fit_partly_frozen():
    module = PartlyFrozen()
    before = copy_of(module)
    trainer = quiet(plugins=[BF16Precision()])
    trainer.fit(module, own_batches(images(4)))
    module.training_step(images(1)[0], 0)  # all of one dtype
    return before, copy_of(module)


def test_what_is_frozen_comes_back_exact_from_a_narrow_fit(workers):
    for before, after in workers(2).run(fit_partly_frozen):
        assert {value.dtype for value in after.values()} == {torch.float32, torch.int64}
        assert torch.equal(after["head.weight"], before["head.weight"])
        assert not torch.equal(after["features.0.weight"], before["features.0.weight"])
        assert not torch.equal(after["features.1.running_mean"], before["features.1.running_mean"])


# ---------------------------------------------------------------------------------------------- averages, saves, parts


class Average(Callback):
    """Weights of an average in validation, as many recipes have it.

    Args:
        swaps: whether tensors change places, or values.
    """

    def __init__(self, swaps):
        self.swaps, self.average, self.own = swaps, None, None

    def on_fit_start(self, trainer, pl_module):
        self.average = [parameter.detach().clone() for parameter in pl_module.parameters()]

    def on_train_batch_end(self, trainer, pl_module, *_):
        for average, parameter in zip(self.average, pl_module.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.5)

    def on_validation_start(self, trainer, pl_module):
        self.own = [
            parameter.data if self.swaps else parameter.detach().clone() for parameter in pl_module.parameters()
        ]
        self._set(pl_module, self.average)

    def on_validation_end(self, trainer, pl_module):
        self._set(pl_module, self.own)

    def _set(self, module, values):
        for parameter, value in zip(module.parameters(), values, strict=True):
            if self.swaps:
                parameter.data = value
            else:
                parameter.data.copy_(value)


def averaged(chosen, batches, swaps, devices=None, **options):
    module = Evaluated()
    callbacks = [Average(swaps)] if swaps is not None else []
    trainer = quiet(chosen, devices, callbacks=callbacks, val_check_interval=1, **options)
    trainer.fit(module, own_batches(batches), DataLoader(vectors(1), batch_size=None))
    return state_of(trainer), module.losses


def averaged_by_us(swaps, narrow):
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS)
    return averaged(chosen, vectors(8), swaps, plugins=[BF16Precision()] if narrow else [])


@pytest.mark.parametrize("swaps", [False, True], ids=["values", "tensors"])
def test_averages_in_validation_are_evaluated_and_training_goes_on_without_them(workers, swaps):
    state, losses = averaged("auto", pairs(8), swaps, 1)
    _, without = averaged("auto", pairs(8), None, 1)
    assert losses != pytest.approx(without, rel=1e-3)  # negative control
    for ours, found in workers(2).run(averaged_by_us, swaps, False):
        torch.testing.assert_close(ours, state, **CLOSE)
        assert found == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("swaps", [False, True], ids=["values", "tensors"])
def test_masters_stay_exact_when_an_average_takes_the_weights_place_for_a_validation(workers, swaps):
    (ours, _), (plain, _) = (workers(2).run(averaged_by_us, each, True)[0] for each in (swaps, None))
    assert same(ours, plain)


def saved(kind, folder):
    """What a checkpoint holds when weights were set just before."""
    keep = ModelCheckpoint(folder, filename="last", every_n_train_steps=1)
    chosen = MoEStrategy(state_dict_type=kind, bucket_megabytes=SMALL_BUCKETS)
    trainer = quiet(
        chosen,
        plugins=[BF16Precision()],
        callbacks=[In("on_train_batch_end", "clamp_data"), keep],
        enable_checkpointing=True,
    )
    trainer.fit(Dense(momentum), own_batches(vectors(2)))
    module = Dense(momentum)
    quiet(MoEStrategy(), plugins=[BF16Precision()], limit_train_batches=0, max_epochs=2).fit(
        module, own_batches(vectors(2)), ckpt_path=folder / "last.ckpt"
    )
    return copy_of(module)


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_holds_what_was_set(workers, tmp_path, kind):
    for state in workers(2).run(saved, kind, tmp_path):
        assert max(float(value.abs().max()) for value in state.values()) <= CLAMPED


class SetExperts(WithExperts):
    def on_train_batch_end(self, *_):
        clamp_data(self)


def train_experts(narrow):
    chosen = MoEStrategy(expert_parallel_size=2, bucket_megabytes=SMALL_BUCKETS)
    return trained(SetExperts(), vectors(6), chosen, plugins=[BF16Precision()] if narrow else [])


def test_weights_of_spread_experts_may_be_set(workers):
    ours, _ = workers(2).run(train_experts, False)
    torch.testing.assert_close(ours, trained(SetExperts(), pairs(6), "auto", devices=1), **CLOSE)
    narrow, _ = workers(2).run(train_experts, True)
    assert max(float(value.abs().max()) for value in narrow.values()) <= CLAMPED


class SetChain(Chain):
    def on_train_batch_end(self, *_):
        rebind(self)


def train_chain(schedule, devices, narrow=False):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(4)]
    module = SetChain()
    chosen = strategy(schedule) if schedule else MoEStrategy()
    quiet(chosen, devices=devices, max_steps=4).fit(module, every_batch(data))
    return copy_of(module)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_weights_of_stages_may_be_set(workers, schedule):
    first, second = workers(2).run(train_chain, schedule, 2)
    torch.testing.assert_close(first | second, train_chain(None, 1), rtol=1e-5, atol=1e-6)


def reshape(trainer, module):
    module.last.weight.data = torch.zeros(20)


def train_reshaped():
    try:
        trained(Dense(), vectors(4), None, callbacks=[Recorder(reshape)])
    except ValueError as error:
        return str(error)
    return "nothing"


def test_another_shape_is_refused_with_the_name(workers):
    for message in workers(2).run(train_reshaped):
        assert "last.weight has the shape [20], and had [1, 20]" in message
