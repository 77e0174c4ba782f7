"""Gradients that are zero, missing on a process, huge or tiny: each is what it is in one process."""

import pytest
import torch
from lightning.pytorch import Callback
from strategy_lab import (
    CLOSE,
    SMALL_BUCKETS,
    Dense,
    WithExperts,
    own_batches,
    quiet,
    state_of,
    trained,
    trained_alone,
    vectors,
)
from test_pipeline import Chain, every_batch, strategy
from torch import nn

from olmoe_lightning import MoEStrategy
from olmoe_lightning.plugins import BF16Precision

SPLIT = ["interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]
"""Schedules that make the gradients of inputs and of weights at different times."""


def pairs(count=4):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(count)]


class Headless(Chain):
    """The last layer begins with zeros, so that the first gradients of the others are zeros; some weights are not used.

    Args:
        factor: of the loss.
        frozen: layers that are not trained.
    """

    def __init__(self, factor=1.0, frozen=()):
        super().__init__()
        self.factor, self.frozen = factor, frozen

    def configure_model(self):
        super().configure_model()
        for name, layer in self.layers.items():
            layer.spare = nn.Parameter(torch.ones(2))
            if name == "3":
                nn.init.zeros_(layer.weight)
            layer.requires_grad_(int(name) not in self.frozen)

    def pipeline_loss(self, output, inputs):
        sums = super().pipeline_loss(output, inputs)
        return sums | {"loss": sums["loss"] * self.factor}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def weights_of(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def train_headless(schedule, devices=2, module=None, **options):
    chosen = strategy(schedule) if schedule else MoEStrategy()
    trainer = quiet(chosen, devices=devices, max_steps=4, **options)
    module = module or Headless()
    trainer.fit(module, every_batch(pairs()))
    return weights_of(module), trainer.strategy.grad_norm


def joined(ranks):
    return {name: value for weights, _ in ranks for name, value in weights.items()}


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_gradient_of_zeros_decays_and_counts_as_a_step(workers, schedule):
    alone, norm = train_headless(None, devices=1)
    ranks = workers(2).run(train_headless, schedule)
    torch.testing.assert_close(joined(ranks), alone, rtol=1e-5, atol=1e-6)
    assert [found for _, found in ranks] == pytest.approx([norm] * 2, rel=1e-5)
    assert all((value == 1).all() for name, value in joined(ranks).items() if name.endswith("spare"))


# ---------------------------------------------------------------------------------------------- none on a process


class Looks(Callback):
    """With a hook between division and clipping, they are two multiplications."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


CLIPPING = {
    "norm": {"gradient_clip_algorithm": "norm"},
    "norm, with a hook": {"gradient_clip_algorithm": "norm", "callbacks": [Looks()]},
    "value": {"gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("kind", CLIPPING)
@pytest.mark.parametrize("frozen", [(2, 3), (0, 1)], ids=["last stage", "first stage"])
def test_a_stage_without_gradients_clips_with_the_others(workers, kind, frozen):
    options = {"gradient_clip_val": 0.01, **CLIPPING[kind]}
    alone, norm = train_headless(None, 1, Chains(frozen), **options)
    ranks = workers(2).run(train_with_frozen, frozen, options)
    torch.testing.assert_close(joined(ranks), alone, rtol=1e-5, atol=1e-6)
    assert [found for _, found in ranks] == pytest.approx([norm] * 2, rel=1e-5)


class Chains(Headless):
    """All layers begin with numbers."""

    def __init__(self, frozen):
        super().__init__(frozen=frozen)

    def configure_model(self):
        super().configure_model()
        if "3" in self.layers:
            torch.manual_seed(3)
            nn.init.normal_(self.layers["3"].weight)


def train_with_frozen(frozen, options):
    return train_headless("1f1b", 2, Chains(frozen), **options)


def one_small_parameter(module):
    """Too few elements for two processes: the second one updates nothing."""
    module.requires_grad_(False)
    module.last.requires_grad_(True)


def few(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train_few(sharded, options):
    chosen = MoEStrategy(shard_optimizer=sharded, bucket_megabytes=SMALL_BUCKETS)
    return trained(Dense(few, change=one_small_parameter), vectors(8), chosen, **options)


@pytest.mark.parametrize("kind", CLIPPING)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_process_that_updates_nothing_clips_with_the_others(workers, kind, sharded):
    options = {"gradient_clip_val": 0.01, **CLIPPING[kind]}
    ours, _ = workers(2).run(train_few, sharded, options)
    module = Dense(few, change=one_small_parameter)
    torch.testing.assert_close(ours, trained(module, vectors(8), "auto", 2, devices=1, **options), **CLOSE)


class SkipsExperts(WithExperts):
    """A layer that a run does not use."""

    def training_step(self, batch, batch_idx):
        return (self.out(self.into(batch)) - batch.sum(1, keepdim=True)).square().mean()


def train_without_experts(kind):
    chosen = MoEStrategy(expert_parallel_size=2, bucket_megabytes=SMALL_BUCKETS)
    return trained(SkipsExperts(), vectors(6), chosen, gradient_clip_val=0.01, **CLIPPING[kind])


@pytest.mark.parametrize("kind", CLIPPING)
def test_experts_without_gradients_clip_with_the_others(workers, kind):
    ours, _ = workers(2).run(train_without_experts, kind)
    options = {"gradient_clip_val": 0.01, **CLIPPING[kind]}
    torch.testing.assert_close(ours, trained_alone(SkipsExperts(), vectors(6), **options), **CLOSE)


# ---------------------------------------------------------------------------------------------- huge and tiny

MODES = {
    "one process": (1, {}),
    "sharded": (2, {}),
    "replicated": (2, {"shard_optimizer": False}),
    "narrow weights": (2, {"bf16": True}),
}


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train_scaled(options, factor, clip):
    options = dict(options)
    plugins = [BF16Precision()] if options.pop("bf16", False) else []
    chosen = MoEStrategy(bucket_megabytes=SMALL_BUCKETS, **options)
    step = lambda module, x, number: module.loss(x).float() * factor  # noqa: E731
    trainer = quiet(chosen, plugins=plugins, gradient_clip_val=clip)
    trainer.fit(Dense(momentum, step=step), own_batches(vectors(4)))
    return state_of(trainer), trainer.strategy.grad_norm, trainer.strategy.skipped_steps


def run_scaled(workers, mode, factor, clip):
    processes, options = MODES[mode]
    if processes == 1:
        return train_scaled(options, factor, clip)
    return workers(processes).run(train_scaled, options, factor, clip)[0]


LARGE, TINY = 2.0**100, 2.0**-100
"""Powers of two, so that the scaled gradients have the same digits; their squares are no numbers of fp32."""


@pytest.mark.parametrize("mode", MODES)
def test_a_huge_gradient_is_clipped_and_not_skipped(workers, mode):
    expected, norm, _ = run_scaled(workers, mode, 1.0, 0.01)
    found, huge, skipped = run_scaled(workers, mode, LARGE, 0.01)
    assert skipped == 0
    assert huge / LARGE == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_a_tiny_gradient_has_a_norm(workers, mode):
    _, norm, _ = run_scaled(workers, mode, 1.0, 1e-30)  # so small a clip that no weight moves
    _, tiny, _ = run_scaled(workers, mode, TINY, 1e-30)
    assert tiny / TINY == pytest.approx(norm, rel=1e-5)


class Scaled(WithExperts):
    """Its loss times a number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_scaled_experts(factor):
    chosen = MoEStrategy(expert_parallel_size=2, bucket_megabytes=SMALL_BUCKETS)
    state = trained(Scaled(factor), vectors(4), chosen, gradient_clip_val=0.01)
    return state, chosen.grad_norm, chosen.skipped_steps


def test_a_huge_gradient_of_spread_experts_is_clipped_and_not_skipped(workers):
    (expected, norm, _), (found, huge, skipped) = (workers(2).run(train_scaled_experts, f)[0] for f in (1.0, LARGE))
    assert skipped == 0
    assert huge / LARGE == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(found, expected, **CLOSE)


def train_huge_chain(factor):
    return train_headless("1f1b", 2, Headless(factor), gradient_clip_val=0.01)


def test_a_huge_gradient_of_a_pipeline_is_clipped_and_not_skipped(workers):
    expected, found = (workers(2).run(train_huge_chain, factor) for factor in (1.0, LARGE))
    torch.testing.assert_close(joined(found), joined(expected), rtol=1e-5, atol=1e-6)
    assert found[0][1] / LARGE == pytest.approx(expected[0][1], rel=1e-5)
