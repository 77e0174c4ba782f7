"""What the parts of strategy and module promise each other, and what a user may change of them."""

import copy

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy_lab import CONFIG, Items, own_batches, quiet, sentences
from torch import nn
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.errors import UserError, UserTypeError
from olmoe_lightning.model.experts import Experts
from olmoe_lightning.parallel import Mesh
from olmoe_lightning.parallel.ownership import Ownership
from olmoe_lightning.training import checks
from olmoe_lightning.training.experts import expert_parameters
from olmoe_lightning.training.objective import Objective

# ---------------------------------------------------------------------------------------------- the strategy's options


def test_options_are_those_of_the_parts_that_own_them():
    strategy = MoEStrategy(
        expert_parallel_size=2,
        pipeline_parallel_size=2,
        schedule="zbv_zero_bubble",
        num_microbatches=6,
        pipeline_split=[1, 1, 1, 2],
        comm="all_to_all",
        on_save_error="warn",
    )
    names = ("expert_parallel_size", "pipeline_parallel_size", "schedule", "num_microbatches", "stages_per_rank")
    assert [getattr(strategy, name) for name in names] == [2, 2, "zbv_zero_bubble", 6, None]
    assert (strategy.pipeline_split, strategy.comm, strategy.on_save_error) == ([1, 1, 1, 2], "all_to_all", "warn")
    with pytest.raises(AttributeError, match=r"num_microbatches cannot be set: give it to MoEStrategy\(...\)"):
        strategy.num_microbatches = 8


def test_a_strategy_without_a_run_says_what_it_lacks():
    with pytest.raises(RuntimeError, match="has a module once the Trainer has started"):
        MoEStrategy().describe()
    with pytest.raises(RuntimeError, match="the mesh exists once the Trainer has started"):
        _ = MoEStrategy().mesh


@pytest.mark.parametrize(
    ("name", "wrong"), [("state_dict_type", "ful"), ("async_save", "later"), ("on_save_error", "ignore")]
)
def test_what_may_change_during_a_run_is_checked_as_at_the_start(name, wrong):
    strategy = MoEStrategy()
    with pytest.raises(UserError, match=rf"{name} \('{wrong}'\) must be"):
        setattr(strategy, name, wrong)
    with pytest.raises(UserError, match=rf"{name} \('{wrong}'\) must be"):
        MoEStrategy(**{name: wrong})


class TurnsToTheBackground(Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.strategy.async_save = True


class TurnsBack(Callback):
    """Saves that wait in the queue stay in the background, whatever comes after them."""

    def on_train_batch_end(self, trainer, *_):
        trainer.strategy.async_save = trainer.global_step % 2 == 0


def save_with(callback, folder):
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(MoEStrategy(expert_parallel_size=2), callbacks=[callback(), keep], enable_checkpointing=True)
    trainer.fit(OLMoE(CONFIG), own_batches(sentences(8)))
    return trainer.global_step


@pytest.mark.parametrize("callback", [TurnsToTheBackground, TurnsBack])
def test_saves_may_move_to_the_background_and_back_during_a_run(workers, tmp_path, callback):
    assert workers(2).run(save_with, callback, tmp_path) == [4, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={step}.ckpt" for step in range(1, 5)]


# ---------------------------------------------------------------------------------------------- the module's loss


class TwiceTheLoss(Objective):
    def pipeline_loss(self, output, inputs):
        sums = super().pipeline_loss(output, inputs)
        return {**sums, "loss": 2 * sums["loss"], "cross_entropy": 2 * sums["cross_entropy"]}


class Doubled(OLMoE):
    def pipeline_stages(self):
        return TwiceTheLoss(self.config, self.built, self.metrics, self._token_bytes)


def logged_loss(module, pipeline):
    strategy = MoEStrategy(pipeline_parallel_size=pipeline, num_microbatches=2)
    trainer = quiet(strategy, devices=pipeline, max_steps=1)
    trainer.fit(module(CONFIG), DataLoader(Items(sentences(1)), batch_size=None))
    return float(trainer.callback_metrics["train/loss"])


def test_another_loss_is_used_with_and_without_a_pipeline(workers):
    once = logged_loss(OLMoE, 1)
    assert logged_loss(Doubled, 1) == pytest.approx(2 * once, rel=1e-6)
    assert workers(2).run(logged_loss, Doubled, 2) == pytest.approx([2 * once] * 2, rel=1e-5)


def test_a_loss_that_would_not_be_called_is_refused():
    with pytest.raises(UserTypeError, match=r"Mine defines pipeline_loss.*return that from pipeline_stages\(\)"):
        type("Mine", (OLMoE,), {"pipeline_loss": lambda self, output, inputs: {}})


def test_stages_are_those_of_the_configuration_as_it_is_now():
    module = OLMoE(CONFIG)
    module.config = CONFIG.replace(num_layers=5)
    assert module.pipeline_stages().pipeline_layers == 5
    assert copy.deepcopy(module).pipeline_stages().pipeline_layers == 5


# ---------------------------------------------------------------------------------------------- experts


class Scaled(Experts):
    """Experts with a weight that all ranks hold."""

    def __init__(self):
        super().__init__(4, 8, 8)
        self.scale = nn.Parameter(torch.ones(3))


def test_only_the_stacked_weights_of_experts_are_spread():
    module = Scaled()
    module.marked = nn.Parameter(torch.ones(4))
    module.marked.is_expert = True
    ownership = Ownership(module, Mesh.single(), expert_parameters(module))
    found = {name for parameter, name in ownership.parameters.items() if ownership.is_expert(parameter)}
    assert found == {"w_gate_up", "w_down", "marked"}


# ---------------------------------------------------------------------------------------------- callbacks

READ_WEIGHTS_OR_MAY = {
    *("Callback", "Checkpoint", "ProgressBar", "LambdaCallback"),  # bases, and any function
    *("BaseFinetuning", "BackboneFinetuning", "ModelPruning"),
    *("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"),
}


def test_every_callback_of_lightning_is_known_or_waited_for():
    """A new one must be read before the strategy trusts it."""
    known = {kind.__name__ for kind in checks._LIGHTNINGS} - {"LightningModule"}
    assert known | READ_WEIGHTS_OR_MAY == set(lightning_callbacks.__all__)
    assert not known & READ_WEIGHTS_OR_MAY
