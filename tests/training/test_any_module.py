"""Any LightningModule on two processes ends with the weights that Lightning's single-device strategy gives it."""

import pytest
import torch
from strategy_lab import (
    CLOSE,
    SMALL_BUCKETS,
    Convolutions,
    Dense,
    WithExperts,
    images,
    language_model,
    numbered,
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


def tie(module):
    module.blocks[2].weight = module.blocks[0].weight


def freeze(module):
    module.blocks[0].requires_grad_(False)
    module.first.bias.requires_grad_(False)


def add_extra(module):
    module.extra = nn.Linear(8, 1)


def scalar_parameter(module):
    module.temperature = nn.Parameter(torch.tensor(0.7))


def mostly_in_optimizer(module):
    return torch.optim.AdamW([*module.first.parameters(), *module.last.parameters()], lr=1e-2)


def tensor_step(module, x, number):
    return module.loss(x)


def dict_step(module, x, number):
    return {"loss": module.loss(x), "kept": x.sum().detach()}


def row_step(module, x, number):
    return module.loss(x).view(1)


def scaled_step(module, x, number):
    return module.loss(x) * module.temperature


def first_batch_only(module, x, number):
    """One rank of two, and one accumulated batch of two in one process, uses `extra`."""
    return module.loss(x) + (module.extra(x).mean() if number % 2 == 0 else 0.0)


def second_step_without(module, x, number):
    """In the second optimizer step no loss uses `extra`: neither weight decay nor momentum may move it."""
    return module.loss(x) + (module.extra(x).mean() if number // 2 != 1 else 0.0)


def sampled_blocks(module, x, number):
    """Stochastic depth: a block that some steps leave out."""
    hidden = torch.tanh(module.first(x))
    hidden = module.blocks[0](hidden)
    if number // 2 % 2 == 0:
        hidden = module.blocks[2](hidden)
    return (module.last(hidden) - 1.0).square().mean()


def penalty_before_forward(module, x, number):
    """Reads the weights of blocks before it calls them."""
    penalty = sum(parameter.square().sum() for parameter in module.blocks.parameters())
    return module.loss(x) + 0.01 * penalty


def weights_without_call(module, x, number):
    """Uses a block's weights but never calls it."""
    hidden = torch.tanh(module.first(x))
    return (
        (module.last(nn.functional.linear(hidden, module.blocks[0].weight, module.blocks[0].bias)) - 1).square().mean()
    )


DENSE = {
    "a plain tensor": {"step": tensor_step},
    "a dict without num_tokens": {"step": dict_step},
    "a loss of shape [1]": {"step": row_step},
    "tied weights": {"change": tie},
    "frozen parameters": {"change": freeze},
    "a parameter without dimensions": {"change": scalar_parameter, "step": scaled_step},
    "parameters outside of the optimizer": {"optimizer": mostly_in_optimizer},
    "parameters used on one rank": {"change": add_extra, "step": first_batch_only},
    "parameters used in some steps": {"change": add_extra, "step": second_step_without},
    "blocks that some steps leave out": {"step": sampled_blocks},
    "weights read before the blocks run": {"step": penalty_before_forward},
    "weights of a block that is never called": {"step": weights_without_call},
}


def train_dense(options, **trainer_options):
    return trained(Dense(**options), numbered(8), **trainer_options)


@pytest.mark.parametrize("kind", DENSE)
def test_two_processes_equal_lightnings_single_device(workers, kind):
    ours, _ = workers(2).run(train_dense, DENSE[kind])
    torch.testing.assert_close(ours, trained_alone(Dense(**DENSE[kind]), numbered(8)), **CLOSE)


def train_replicated(options):
    return train_dense(options, strategy=MoEStrategy(shard_optimizer=False, bucket_megabytes=SMALL_BUCKETS))


@pytest.mark.parametrize("kind", ["a plain tensor", "parameters used in some steps", "a parameter without dimensions"])
def test_without_sharding_two_processes_equal_lightnings_single_device(workers, kind):
    ours, _ = workers(2).run(train_replicated, DENSE[kind])
    torch.testing.assert_close(ours, trained_alone(Dense(**DENSE[kind]), numbered(8)), **CLOSE)


@pytest.mark.parametrize("kind", DENSE)
def test_one_process_equals_lightnings_single_device(kind):
    ours = trained(Dense(**DENSE[kind]), numbered(4), devices=1)
    torch.testing.assert_close(ours, trained_alone(Dense(**DENSE[kind]), numbered(4), ranks=1), **CLOSE)


def train_convolutions(strategy):
    strategy = MoEStrategy(bucket_megabytes=SMALL_BUCKETS) if strategy == "moe" else strategy
    trainer = quiet(strategy)
    module = Convolutions()
    trainer.fit(module, own_batches(images(8)))
    state = state_of(trainer)
    return state, {name: value.clone() for name, value in module.named_buffers()}


def test_a_cnn_with_batch_norm_equals_lightnings_ddp_with_its_running_statistics(workers):
    ours, _ = zip(*workers(2).run(train_convolutions, "moe"), strict=True)
    theirs, _ = zip(*workers(2).run(train_convolutions, "ddp"), strict=True)
    assert ours[0]["features.1.num_batches_tracked"] == 4
    torch.testing.assert_close(ours[0], theirs[0], **CLOSE)


def test_running_statistics_end_equal_on_all_ranks(workers):
    (_, first), (_, second) = workers(2).run(train_convolutions, "moe")
    assert same(first, second)


def train_with_experts(expert_parallel_size):
    strategy = MoEStrategy(expert_parallel_size=expert_parallel_size, bucket_megabytes=SMALL_BUCKETS)
    module = WithExperts()
    trainer = quiet(strategy)
    trainer.fit(module, own_batches(vectors(6)))
    return state_of(trainer), len(module.moe.experts.w_down)


def test_a_users_module_with_our_layer_shares_its_experts(workers):
    (ours, here), (_, there) = workers(2).run(train_with_experts, 2)
    assert (here, there) == (2, 2)
    torch.testing.assert_close(ours, trained_alone(WithExperts(), vectors(6)), **CLOSE)


def train_language_model(batches, expert_parallel_size=1, **options):
    strategy = MoEStrategy(expert_parallel_size=expert_parallel_size, bucket_megabytes=SMALL_BUCKETS)
    return trained(language_model(), batches, strategy, **options)


def test_a_plain_training_step_under_autocast_trains_with_experts_on_two_ranks(workers):
    """bf16-mixed rounds activations; the two runs differ by its rounding, the weights by much less than a step."""
    ours, _ = workers(2).run(train_language_model, sentences(6), 2, precision="bf16-mixed")
    alone = train_language_model(sentences(6), devices=1, accumulate=2, precision="bf16-mixed")
    start = language_model()
    start.built()
    moved = {name: (alone[name] - value).abs().max() for name, value in start.state_dict().items()}
    for name, value in alone.items():
        assert (ours[name] - value).abs().mean() <= 0.05 * moved[name] + 1e-6, name
