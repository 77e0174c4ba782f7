"""Weights that arrive while the next forward pass runs: those that have not arrived are never read."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from strategy_lab import (
    CLOSE,
    SMALL_BUCKETS,
    Dense,
    language_model,
    numbered,
    own_batches,
    quiet,
    same,
    sentences,
    slow_network,
    state_of,
    trained,
    trained_alone,
)
from test_any_module import DENSE

from olmoe_lightning import MoEStrategy


class Trusted(Dense):
    """Says that its layers alone read weights, which wait for them one by one."""

    reads_weights_between_steps = False

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


def train_dense_slowly(kind, make):
    with slow_network():
        return trained(make(**DENSE[kind]), numbered(8))


@pytest.mark.parametrize("kind", DENSE)
def test_modules_of_third_parties_see_complete_weights_however_slow_the_network(workers, kind):
    ours, _ = workers(2).run(train_dense_slowly, kind, Dense)
    torch.testing.assert_close(ours, trained_alone(Dense(**DENSE[kind]), numbered(8)), **CLOSE)


LAYERWISE = [kind for kind in DENSE if kind != "weights read before the blocks run"]


@pytest.mark.parametrize("kind", LAYERWISE)
def test_layers_that_wait_for_their_own_weights_see_complete_ones(workers, kind):
    ours, _ = workers(2).run(train_dense_slowly, kind, Trusted)
    torch.testing.assert_close(ours, trained_alone(Dense(**DENSE[kind]), numbered(8)), **CLOSE)


def test_the_slow_network_shows_weights_that_are_used_too_early(workers):
    """Without the guard that asks what a module says of its hooks the reader above would be wrong."""
    ours, _ = workers(2).run(train_dense_slowly, "weights read before the blocks run", Trusted)
    right = trained_alone(Dense(**DENSE["weights read before the blocks run"]), numbered(8))
    assert not torch.allclose(ours["blocks.2.weight"], right["blocks.2.weight"], **CLOSE)


class Looking(MoEStrategy):
    """Notes after each optimizer step whether all weights are there."""

    def __init__(self, **options):
        super().__init__(bucket_megabytes=SMALL_BUCKETS, **options)
        self.complete = []

    def optimizer_step(self, *args, **kwargs):
        result = super().optimizer_step(*args, **kwargs)
        self.complete.append(is_complete(self.lightning_module))
        return result


def is_complete(module):
    return all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def train_language_model(slow, *callbacks, module=None, **options):
    strategy = Looking(state_dict_type="full", **options)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = quiet(strategy, accumulate_grad_batches=2, callbacks=list(callbacks), enable_checkpointing=saves)
    if not slow:
        trainer.fit(module or language_model(), own_batches(sentences(12)))
        return state_of(trainer), strategy.complete
    with slow_network():
        trainer.fit(module or language_model(), own_batches(sentences(12)))
        return state_of(trainer), strategy.complete


@pytest.mark.parametrize("expert_parallel_size", [1, 2])
def test_overlap_changes_no_bit(workers, expert_parallel_size):
    (ours, during), _ = workers(2).run(train_language_model, True, expert_parallel_size=expert_parallel_size)
    (without, complete), _ = workers(2).run(
        train_language_model, False, expert_parallel_size=expert_parallel_size, overlap_param_gather=False
    )
    assert same(ours, without)
    assert (during, complete) == ([False] * 3, [True] * 3)  # so there was something to wait for


class Reads(Callback):
    """A third party's callback that looks at the weights in one hook, an average of weights for example."""

    def __init__(self, hook):
        self.sums = []
        setattr(self, hook, self.read)

    def read(self, trainer, pl_module, *_):
        self.sums.append(sum(parameter.detach().double().sum() for parameter in pl_module.parameters()))


HOOKS = ("on_train_batch_end", "on_before_zero_grad", "on_train_epoch_end", "on_validation_start", "on_train_end")


def sums_in(hook, with_lambda):
    reads = Reads(hook)
    callback = LambdaCallback(**{hook: reads.read}) if with_lambda else reads
    train_language_model(True, callback)
    return reads.sums


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("with_lambda", [False, True], ids=["own class", "LambdaCallback"])
def test_a_strange_callback_reads_complete_weights_on_all_ranks(workers, hook, with_lambda):
    first, second = workers(2).run(sums_in, hook, with_lambda)
    assert first == second
    if hook != "on_validation_start":  # there is no validation in this run
        assert first
        assert all(torch.isfinite(total) for total in first)


def train_and_keep(folder, slow):
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    train_language_model(slow, keep, overlap_param_gather=slow)


def test_a_checkpoint_in_the_middle_waits_for_the_weights(workers, tmp_path):
    for slow in (True, False):
        workers(2).run(train_and_keep, tmp_path / str(slow), slow)
    for step in (1, 2, 3):
        late, prompt = (
            torch.load(tmp_path / str(slow) / f"step={step}.ckpt", weights_only=True) for slow in (True, False)
        )
        assert same(late["state_dict"], prompt["state_dict"])
