"""OLMoE's optimizer: groups, learning rates over a run and a resume, and the selection bias beside it."""

import pytest
import torch
from lightning.pytorch import Callback

from olmoe_lightning import OLMoE


class LearningRates(Callback):
    """The learning rate of each group that every step was made with, and the biases after it."""

    def __init__(self):
        self.rates, self.biases, self.counts = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append({group["name"]: group["lr"] for group in optimizer.param_groups})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.counts.append(pl_module.routing_stats.counts.clone())
        if pl_module.config.selection_bias:
            self.biases.append(torch.stack([block.moe.router.selection_bias for block in pl_module.model.blocks]))


def groups_of(module, trainer, data):
    """Names of the parameters in each group of the optimizer that a fit makes."""
    trainer.fit(module, data)
    names = {id(parameter): name for name, parameter in module.model.named_parameters()}
    return {
        group["name"]: ({names[id(parameter)] for parameter in group["params"]}, group["weight_decay"])
        for group in trainer.optimizers[0].param_groups
    }


def test_every_parameter_is_in_one_group_and_only_matrices_decay(small_config, small_data, quiet_trainer):
    module = OLMoE(small_config, weight_decay=0.3)
    groups = groups_of(module, quiet_trainer(max_steps=1), small_data())
    assert {name: decay for name, (_, decay) in groups.items()} == {"dense": 0.3, "experts": 0.3, "dense_no_decay": 0.0}
    parameters = dict(module.model.named_parameters())
    assert sorted(name for names, _ in groups.values() for name in names) == sorted(parameters)
    assert groups["experts"][0] == {name for name in parameters if ".moe.experts." in name}
    assert groups["dense_no_decay"][0] == {name for name, p in parameters.items() if p.ndim == 1} | {"embed.weight"}


def test_decay_all_decays_norms_and_embedding_too(small_config, small_data, quiet_trainer):
    module = OLMoE(small_config, weight_decay=0.3, decay_all=True)
    groups = groups_of(module, quiet_trainer(max_steps=1), small_data())
    assert {name: decay for name, (names, decay) in groups.items() if names} == {"dense": 0.3, "experts": 0.3}


def test_a_tied_embedding_is_in_one_group_only(small_config, small_data, quiet_trainer):
    module = OLMoE(small_config.replace(tie_embeddings=True))
    groups = groups_of(module, quiet_trainer(max_steps=1), small_data())
    assert sum("embed.weight" in names for names, _ in groups.values()) == 1


def test_the_expert_multiplier_scales_the_experts_alone(small_config, small_data, quiet_trainer):
    watch = LearningRates()
    module = OLMoE(small_config, learning_rate=1e-3, expert_lr_multiplier=0.5, schedule="constant")
    quiet_trainer(watch, max_steps=2).fit(module, small_data())
    assert watch.rates == [{"dense": 1e-3, "experts": 5e-4, "dense_no_decay": 1e-3}] * 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "cosine", "min_lr_ratio": 0.0}, [1, 0.853553, 0.5, 0.146447]),
        ({"schedule": "wsd", "decay_fraction": 0.5, "min_lr_ratio": 0.0, "warmup_steps": 1}, [1, 1, 1, 0.5]),
        ({"schedule": "cosine", "schedule_steps": 8, "min_lr_ratio": 0.0}, [1, 0.961940, 0.853553, 0.691342]),
        # [4, 32] tokens a batch: 300 tokens are a bit more than two steps
        ({"schedule": "constant", "warmup_tokens": 300}, [1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_learning_rates_of_a_run(small_config, small_data, quiet_trainer, options, expected):
    watch = LearningRates()
    quiet_trainer(watch).fit(OLMoE(small_config, learning_rate=2.0e-3, **options), small_data())
    assert [rates["dense"] / 2.0e-3 for rates in watch.rates] == pytest.approx(expected, rel=1e-5)


def test_warmup_in_tokens_counts_accumulated_batches(small_config, small_data, quiet_trainer):
    watch = LearningRates()
    module = OLMoE(small_config, learning_rate=1e-3, schedule="constant", warmup_tokens=1024)
    quiet_trainer(watch, accumulate_grad_batches=2).fit(module, small_data())
    assert [rates["dense"] / 1e-3 for rates in watch.rates] == pytest.approx([0.25, 0.5, 0.75, 1])


def test_the_schedule_of_a_run_measured_in_epochs_ends_with_it(small_config, small_data, quiet_trainer):
    watch = LearningRates()
    trainer = quiet_trainer(watch, max_steps=-1, max_epochs=2, limit_train_batches=4)
    trainer.fit(OLMoE(small_config, learning_rate=1e-3, min_lr_ratio=0.0), small_data())
    assert len(watch.rates) == 8
    assert watch.rates[4]["dense"] == pytest.approx(5e-4)


def test_resuming_continues_learning_rate_and_weights(small_config, small_data, quiet_trainer, tmp_path):
    options = {"learning_rate": 1e-2, "warmup_steps": 2, "expert_lr_multiplier": 2.0, "schedule_steps": 6}
    whole, first, second = LearningRates(), LearningRates(), LearningRates()
    reference = OLMoE(small_config, **options)
    quiet_trainer(whole, max_steps=6).fit(reference, small_data())

    trainer = quiet_trainer(first, max_steps=3)
    trainer.fit(OLMoE(small_config, **options), small_data())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = OLMoE(small_config, **options)
    quiet_trainer(second, max_steps=6).fit(resumed, small_data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert first.rates + second.rates == whole.rates
    for name, value in reference.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_resuming_with_another_learning_rate_says_that_the_checkpoints_is_used(
    small_config, small_data, quiet_trainer, tmp_path
):
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(OLMoE(small_config, learning_rate=1e-3), small_data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=r"continues with learning_rate 0.001 of the checkpoint, not with .* 0.02"):
        quiet_trainer(max_steps=2).fit(
            OLMoE(small_config, learning_rate=0.02), small_data(), ckpt_path=tmp_path / "a.ckpt"
        )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_selection_bias_moves_once_per_optimizer_step_by_the_load_of_its_whole_window(
    small_config, small_data, quiet_trainer, accumulate
):
    config = small_config.replace(selection_bias=True, bias_update_rate=0.01)
    watch = LearningRates()
    trainer = quiet_trainer(watch, max_steps=3, accumulate_grad_batches=accumulate, val_check_interval=accumulate)
    trainer.fit(OLMoE(config), small_data())
    expected = torch.zeros(2, 4)
    assert len(watch.counts) == 3 * accumulate
    for step in range(3):
        window = torch.stack(watch.counts[step * accumulate : (step + 1) * accumulate]).sum(0).float()
        for micro in range(accumulate - 1):  # nothing moves inside of the window
            assert torch.equal(watch.biases[step * accumulate + micro], expected)
        expected = expected + 0.01 * torch.sign(window.mean(1, keepdim=True) - window)
        torch.testing.assert_close(watch.biases[(step + 1) * accumulate - 1], expected)
    assert expected.abs().max() > 0


def test_selection_bias_is_frozen_in_evaluation(small_config, small_data, quiet_trainer):
    module = OLMoE(small_config.replace(selection_bias=True, bias_update_rate=0.01))
    quiet_trainer(max_steps=2).fit(module, small_data())
    before = {name: value.clone() for name, value in module.model.named_buffers()}
    quiet_trainer().validate(module, small_data(), verbose=False)
    module.generate(torch.ones(1, 4, dtype=torch.int64), 4)
    assert before
    assert all(torch.equal(value, before[name]) for name, value in module.model.named_buffers())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, r"learning_rate \(0.0\) must be positive"),
        ({"weight_decay": -0.1}, r"weight_decay \(-0.1\) must not be negative"),
        ({"betas": (0.9, 1.0)}, r"betas \(0.9, 1.0\) must lie in"),
        ({"warmup_steps": 2, "warmup_tokens": 3}, "warmup_steps is 2 and warmup_tokens is 3"),
        ({"min_lr_ratio": 2.0}, r"min_lr_ratio \(2.0\)"),
        ({"schedule": "linear"}, "must be one of 'cosine', 'wsd', 'constant'"),
        ({"overrides": {"num_expert": 3}}, "did you mean 'num_experts'"),
        ({"config": "tinny"}, "did you mean 'tiny'"),
    ],
)
def test_wrong_arguments_are_named_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        OLMoE(**options)


def test_a_warmup_longer_than_the_run_is_an_error_but_not_in_a_trial_of_a_few_steps(
    small_config, small_data, quiet_trainer
):
    with pytest.raises(ValueError, match=r"warm-up \(10 steps\) is longer than the schedule \(4 steps\)"):
        quiet_trainer().fit(OLMoE(small_config, warmup_steps=10), small_data())
    quiet_trainer(fast_dev_run=True).fit(OLMoE(small_config, warmup_steps=10), small_data())


def test_warmup_in_tokens_needs_to_know_the_tokens_of_a_step(small_config, small_data, quiet_trainer):
    data = small_data()
    data.prepare_data()
    data.setup()
    with pytest.raises(ValueError, match="needs a data module with batch_size and seq_len"):
        quiet_trainer().fit(OLMoE(small_config, warmup_tokens=100), data.train_dataloader())


@pytest.mark.parametrize("limits", [{"max_steps": 0}, {"max_epochs": 0}, {"limit_train_batches": 0, "max_epochs": 1}])
def test_a_fit_without_a_step_ends_at_once_whatever_the_schedule(limits, small_config, small_data, quiet_trainer):
    module = OLMoE(small_config, warmup_steps=3)
    module.built()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = quiet_trainer(**limits)
    trainer.fit(module, small_data())
    assert trainer.global_step == 0
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
