"""Modules, optimizers and runs that are not the usual ones: what they keep comes back, or a sentence says why not."""

import re

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from test_any_topology import CONFIG, Model
from torch import nn
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.checkpoint.directory import CorruptCheckpoint
from olmoe_lightning.checkpoint.meta import KEY, read_meta
from olmoe_lightning.plugins import BF16Precision
from olmoe_lightning.training.snapshot import SaveError


class Plain(LightningModule):
    """A linear layer; ``change`` puts something odd into it."""

    def __init__(self, change=lambda module: None, optimizer=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.make_optimizer = optimizer or (lambda module: torch.optim.AdamW(module.parameters(), lr=0.1))
        change(self)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean() + sum(p.float().square().sum() for p in self.parameters()) * 0.01

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch).square().mean())

    def configure_optimizers(self):
        return self.make_optimizer(self)


def data(count=4):
    generator = torch.Generator().manual_seed(0)
    items = [torch.randn(4, 4, generator=generator) for _ in range(count)]
    return DataLoader(items, batch_size=None, generator=generator)  # making an iterator takes a number of it


def trainer(devices=1, callbacks=(), plugins=(), expert_parallel_size=1, max_epochs=1, **options):
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MoEStrategy(expert_parallel_size=expert_parallel_size, **options),
        plugins=list(plugins),
        max_epochs=max_epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def fitted(path, module, **options):
    run = trainer(**options)
    run.fit(module, data())
    run.save_checkpoint(path)
    return run


# ---------------------------------------------------------------------------------------------- modules


def test_weights_that_are_not_contiguous_come_back(tmp_path):
    def transpose(module):
        module.layer.weight = nn.Parameter(torch.arange(16.0).view(4, 4).T)

    run = fitted(tmp_path / "a.ckpt", Plain(transpose))
    assert not run.lightning_module.layer.weight.is_contiguous()
    whole = Plain(transpose)
    trainer(max_epochs=2).fit(whole, data())
    resumed = Plain(transpose)
    trainer(max_epochs=2).fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt")
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


class WithExtra(nn.Module):
    value = 0.0

    def get_extra_state(self):
        return torch.tensor(self.value)

    def set_extra_state(self, state):
        self.value = float(state)


def add_oddities(module):
    module.extra = WithExtra()
    module.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    module.register_buffer("nothing", torch.empty(0))
    module.register_buffer("count", torch.tensor(0))
    module.scale = nn.Parameter(torch.tensor(0.5))
    module.frozen = nn.Parameter(torch.ones(3).bfloat16(), requires_grad=False)
    module.second = nn.Linear(4, 4, bias=False)
    module.second.weight = module.layer.weight


def test_extra_state_buffers_scalars_frozen_and_tied_weights_come_back(tmp_path):
    module = Plain(add_oddities)
    run = trainer()
    run.fit(module, data())
    module.extra.value, module.count.data = 7.0, torch.tensor(3)
    run.save_checkpoint(tmp_path / "a.ckpt")
    fresh = Plain(add_oddities)
    trainer().validate(fresh, data(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert fresh.extra.value == 7.0
    for name, value in module.state_dict().items():
        if not name.endswith("_extra_state"):
            torch.testing.assert_close(fresh.state_dict()[name], value, rtol=0, atol=0)
    assert fresh.second.weight is fresh.layer.weight
    trainer(max_epochs=2).fit(Plain(add_oddities), data(), ckpt_path=tmp_path / "a.ckpt")


class Hides(Plain):
    """Leaves a trained parameter out of its state."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state.pop("layer.bias", None)
        return state


def test_a_trained_parameter_that_a_module_hides_is_saved_with_its_moments(tmp_path):
    fitted(tmp_path / "a.ckpt", Hides())
    assert "layer.bias" in read_meta(tmp_path / "a.ckpt")[KEY]["scalars"]
    trainer(max_epochs=2).fit(Hides(), data(), ckpt_path=tmp_path / "a.ckpt")


# ---------------------------------------------------------------------------------------------- optimizers


def two_groups(order):
    def make(module):
        options = {"weight": {"lr": 0.1}, "bias": {"lr": 0.7}}
        return torch.optim.AdamW([{"params": [getattr(module.layer, name)], **options[name]} for name in order])

    return make


def test_parameters_in_other_groups_than_before_are_refused(tmp_path):
    fitted(tmp_path / "a.ckpt", Plain(optimizer=two_groups(["weight", "bias"])))
    with pytest.raises(
        ValueError, match=r"2 parameters are in other parameter groups .*layer\.weight in group 1 instead of 0"
    ):
        trainer(max_epochs=2).fit(
            Plain(optimizer=two_groups(["bias", "weight"])), data(), ckpt_path=tmp_path / "a.ckpt"
        )


class Factored(Model):
    """Its optimizer is said to be what it is not, as it would be refused before it has a state."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adafactor(self.parameters())
        optimizer.elementwise = True
        return optimizer


def save_factored(path, expert_parallel_size):
    run = trainer(2, expert_parallel_size=expert_parallel_size, shard_optimizer=False)
    run.fit(Factored(CONFIG))
    try:
        run.save_checkpoint(path)
    except SaveError as error:
        return str(error)
    return "saved"


def test_state_of_whole_experts_is_refused_on_all_ranks_where_they_are_spread(workers, tmp_path):
    for message in workers(2).run(save_factored, tmp_path / "spread.ckpt", 2):
        assert re.search(r"row_var of .*experts.* has the shape .*expert_parallel_size=1", message), message
    assert workers(2).run(save_factored, tmp_path / "whole.ckpt", 1) == ["saved", "saved"]


# ---------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("plugin", [None, BF16Precision])
def test_after_a_fit_another_checkpoint_is_what_is_validated_and_saved(tmp_path, plugin):
    plugins = [plugin()] if plugin else []
    fitted(tmp_path / "old.ckpt", Plain(), plugins=plugins)
    old = Plain()
    (expected,) = trainer(plugins=plugins).validate(old, data(), ckpt_path=tmp_path / "old.ckpt", verbose=False)
    run = trainer(max_epochs=3, plugins=[plugin()] if plugin else [])
    module = Plain()
    run.fit(module, data())
    (found,) = run.validate(module, data(), ckpt_path=tmp_path / "old.ckpt", verbose=False)
    assert found == expected
    run.save_checkpoint(tmp_path / "again.ckpt")
    again = Plain()
    (found,) = trainer(plugins=plugins).validate(again, data(), ckpt_path=tmp_path / "again.ckpt", verbose=False)
    assert found == expected


@pytest.mark.parametrize("plugin", [None, BF16Precision])
def test_weights_changed_after_a_fit_are_saved_as_they_are(tmp_path, plugin):
    run = trainer(plugins=[plugin()] if plugin else [])
    module = Plain()
    run.fit(module, data())
    with torch.no_grad():
        module.layer.weight.fill_(2.0)
    run.save_checkpoint(tmp_path / "a.ckpt")
    fresh = Plain()
    trainer().validate(fresh, data(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert (fresh.layer.weight == 2.0).all()


def test_an_index_that_lacks_a_tensor_is_damage(tmp_path):
    fitted(tmp_path / "a.ckpt", Plain())
    index = tmp_path / "a.ckpt" / ".metadata"
    metadata = torch.serialization.pickle.loads(index.read_bytes())
    for name in ("state_dict.layer.weight", "optimizer.layer.weight.exp_avg"):
        kept = dict(metadata.state_dict_metadata)
        del metadata.state_dict_metadata[name]
        index.write_bytes(torch.serialization.pickle.dumps(metadata))
        with pytest.raises(CorruptCheckpoint, match=rf"without values: {name.removeprefix('state_dict.')}"):
            trainer(max_epochs=2).fit(Plain(), data(), ckpt_path=tmp_path / "a.ckpt")
        metadata.state_dict_metadata = kept


def test_weights_alone_are_no_run_to_resume(tmp_path):
    run = trainer()
    run.fit(Plain(), data())
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    with pytest.raises(ValueError, match="holds weights without the state of a training run"):
        trainer(max_epochs=2).fit(Plain(), data(), ckpt_path=tmp_path / "a.ckpt")


class NoFingerprint(LightningDataModule):
    def train_dataloader(self):
        return data()

    def fingerprint(self):
        raise RuntimeError("no fingers")


def save_without_fingerprint(path):
    run = trainer(2)
    run.fit(Plain(), NoFingerprint())
    run.save_checkpoint(path)
    return path.is_dir()


@pytest.mark.filterwarnings("ignore:Checkpoints of this run have an empty manifest")
def test_a_manifest_that_cannot_be_made_is_no_reason_to_lose_a_checkpoint(workers, tmp_path):
    assert workers(2).run(save_without_fingerprint, tmp_path / "a.ckpt") == [True, True]


def save_file_where_a_file_is(folder, on_save_error):
    run = trainer(2, state_dict_type="full", on_save_error=on_save_error)
    run.fit(Plain(), data())
    try:
        run.save_checkpoint(folder / "file" / "a.ckpt")
    except SaveError as error:
        return str(error)
    return "went on"


def test_all_ranks_learn_that_a_joined_file_was_not_written(workers, tmp_path):
    (tmp_path / "file").write_text("")
    for message in workers(2).run(save_file_where_a_file_is, tmp_path, "raise"):
        assert "no checkpoint was written to" in message
    assert workers(2).run(save_file_where_a_file_is, tmp_path, "warn") == ["went on"] * 2


@pytest.mark.parametrize(("kind", "async_save"), [("sharded", False), ("sharded", True), ("full", False)])
def test_names_that_are_taken_get_a_version_and_old_ones_go(tmp_path, kind, async_save):
    keep = ModelCheckpoint(tmp_path, "best", every_n_train_steps=1, save_top_k=2, monitor="loss", mode="min")

    class Logs(Plain):
        def training_step(self, batch, batch_idx):
            self.log("loss", float(10 - batch_idx))
            return super().training_step(batch, batch_idx)

    run = trainer(callbacks=[keep], state_dict_type=kind, async_save=async_save)
    run.fit(Logs(), data())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-v1.ckpt", "best.ckpt"]
    assert sorted(float(score) for score in keep.best_k_models.values()) == [7.0, 8.0]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_old_ones_with_names_of_their_own_go(tmp_path, kind):
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    trainer(callbacks=[keep], state_dict_type=kind).fit(Plain(), data())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=3.ckpt", "step=4.ckpt"]


def test_skipped_steps_and_random_numbers_are_in_a_joined_file_too(tmp_path):
    run = trainer(state_dict_type="full")
    run.fit(Plain(), data())
    run.strategy._step.skipped_steps = 3
    torch.manual_seed(11)
    run.save_checkpoint(tmp_path / "a.ckpt")
    expected = torch.rand(1)

    class Draws(Plain):
        def on_train_start(self):
            self.drawn = torch.rand(1)

    module, resumed = Draws(), trainer(state_dict_type="full", max_epochs=2)
    resumed.fit(module, data(), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.strategy.skipped_steps == 3
    assert torch.equal(module.drawn, expected)
