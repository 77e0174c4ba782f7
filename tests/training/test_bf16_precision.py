"""bfloat16 weights with fp32 masters, and the other precisions that Lightning offers."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from strategy_lab import (
    CLOSE,
    SMALL_BUCKETS,
    Dense,
    Recorder,
    copy_of,
    language_model,
    own_batches,
    quiet,
    same,
    sentences,
    state_of,
    trained,
    trained_alone,
    vectors,
)
from torch import nn

from olmoe_lightning import MoEStrategy
from olmoe_lightning.plugins import BF16Precision


class Slope(LightningModule):
    """w descends along a gradient of 1 whatever happens."""

    def __init__(self, lr):
        super().__init__()
        self.w = nn.Parameter(torch.full((64,), 1.0))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        return self.w.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def train_bf16(module, batches, expert_parallel_size=1, **options):
    strategy = MoEStrategy(expert_parallel_size=expert_parallel_size, bucket_megabytes=SMALL_BUCKETS)
    dtypes = {}

    class Looks(Callback):
        def on_fit_start(self, trainer, pl_module):
            dtypes.update({name: value.dtype for name, value in pl_module.state_dict().items()})

    callbacks = [*options.pop("callbacks", []), Looks()]
    trainer = quiet(strategy, plugins=[BF16Precision()], callbacks=callbacks, **options)
    trainer.fit(module, own_batches(batches))
    return state_of(trainer), dtypes


def start_bf16(make):
    return train_bf16(make(), vectors(2), limit_train_batches=0)


@pytest.mark.parametrize("make", [Dense, language_model])
def test_masters_start_from_the_fp32_values_of_the_module(workers, make):
    (masters, dtypes), _ = workers(2).run(start_bf16, make)
    module = make()
    module.configure_model()
    assert same(masters, copy_of(module))
    weights = {dtype for name, dtype in dtypes.items() if not name.endswith("selection_bias")}
    assert weights == {torch.bfloat16}


LITTLE = 2.0**-12
"""A sixteenth of the distance between 1 and its neighbour below in bf16: an update that rounding loses."""


def test_fifty_small_updates_add_up():
    (state, _) = train_bf16(Slope(LITTLE), vectors(50), devices=1)
    assert (state["w"] == 1 - 50 * LITTLE).all()


def test_without_masters_small_updates_are_lost():
    state = trained(Slope(LITTLE), vectors(50), "auto", devices=1, precision="bf16-true")
    assert (state["w"] == 1).all()


def slope_over_many_microbatches():
    return train_bf16(Slope(1.0), vectors(600), accumulate_grad_batches=300)


def test_gradients_of_many_microbatches_are_summed_in_fp32(workers):
    """Sums of 1 stop growing at 256 in bf16."""
    for state, _ in workers(2).run(slope_over_many_microbatches):
        assert (state["w"] == 0).all()


def biases(expert_parallel_size):
    module = language_model()
    look = Recorder(lambda _, module: module.model.blocks[0].moe.router.selection_bias.clone())
    train_bf16(module, sentences(6), expert_parallel_size, callbacks=[look])
    return look.seen


@pytest.mark.parametrize("expert_parallel_size", [1, 2])
def test_the_selection_bias_stays_fp32(workers, expert_parallel_size):
    first, second = workers(2).run(biases, expert_parallel_size)
    for ours, others in zip(first, second, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, others)
    assert not torch.equal(first[2], first[2].bfloat16().float())


def test_another_strategy_cannot_train_with_it_but_can_evaluate():
    trainer = quiet("auto", devices=1, plugins=[BF16Precision()])
    with pytest.raises(ValueError, match=r"fp32 masters, which SingleDeviceStrategy does not keep; use\s*strategy=MoE"):
        trainer.fit(Dense(), own_batches(vectors(1)))
    trainer = quiet("auto", devices=1, plugins=[BF16Precision()])
    assert trainer.validate(language_model(), own_batches(sentences(1)), verbose=False)[0]["val/loss"] > 0


# ---------------------------------------------------------------------------------------------- Lightning's own

REFUSED = {
    "16-true": {"precision": "16-true"},
    "16-mixed": {"plugins": [MixedPrecision("16-mixed", "cpu")]},
}


@pytest.mark.parametrize("precision", REFUSED)
def test_fp16_is_refused_with_advice(precision):
    trainer = quiet(MoEStrategy(), devices=1, **REFUSED[precision])
    with pytest.raises(
        MisconfigurationException, match=rf"precision '{precision}' needs a gradient scaler.*BF16Precision"
    ):
        trainer.fit(Dense(), own_batches(vectors(1)))


def test_lightning_takes_16_mixed_for_bf16_mixed_on_a_cpu():
    """So that nothing is left for us to refuse there; on a GPU there is a scaler, as in the test above."""
    assert quiet(MoEStrategy(), devices=1, precision="16-mixed").precision == "bf16-mixed"


def train_with(precision):
    return trained(Dense(), vectors(8), precision=precision)


def test_bf16_mixed_equals_one_process(workers):
    ours, _ = workers(2).run(train_with, "bf16-mixed")
    torch.testing.assert_close(ours, trained_alone(Dense(), vectors(8), precision="bf16-mixed"), **CLOSE)


def train_bf16_true(expert_parallel_size):
    strategy = MoEStrategy(expert_parallel_size=expert_parallel_size, bucket_megabytes=SMALL_BUCKETS)
    trainer = quiet(strategy, precision="bf16-true")
    trainer.fit(language_model(), own_batches(sentences(4)))
    return float(trainer.callback_metrics["train/loss"]), {p.dtype for p in trainer.lightning_module.parameters()}


@pytest.mark.parametrize("expert_parallel_size", [1, 2])
def test_lightnings_bf16_true_gets_masters_as_well(workers, expert_parallel_size):
    for loss, dtypes in workers(2).run(train_bf16_true, expert_parallel_size):
        assert 3.0 < loss < 5.0  # of 64 tokens: 4.16 nats
        assert dtypes == {torch.bfloat16}


def test_double_precision_is_not_silently_narrowed():
    """Masters are fp32; either the result is the double one, or it is refused with the parameter's name."""
    with pytest.raises(MisconfigurationException, match=r"first\.weight.*float64"):
        trained(Dense(), vectors(4), MoEStrategy(), devices=1, precision="64-true")


class Waves(Dense):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + (self.phase * batch).abs().mean()


def test_complex_parameters_are_not_silently_made_real():
    with pytest.raises(MisconfigurationException, match=r"phase.*complex64"):
        trained(Waves(), vectors(4), MoEStrategy(), devices=1)
