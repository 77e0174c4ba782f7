"""Checkpoints: one file, as a single process would write it, whatever the topology that wrote and that reads it."""

import functools

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy_lab import (
    CLOSE,
    CONFIG,
    SMALL_BUCKETS,
    Dense,
    WithExperts,
    language_model,
    own_batches,
    quiet,
    rank_and_size,
    same,
    sentences,
    vectors,
)
from torch import nn

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.plugins import BF16Precision

Joined = functools.partial(MoEStrategy, state_dict_type="full")

TOPOLOGIES = {
    "stock": lambda: "auto",  # Lightning's single device
    "1x1": lambda: Joined(),
    "2x1": lambda: Joined(bucket_megabytes=SMALL_BUCKETS),
    "2x1 replicated": lambda: Joined(shard_optimizer=False, bucket_megabytes=SMALL_BUCKETS),
    "1x2": lambda: Joined(expert_parallel_size=2, bucket_megabytes=SMALL_BUCKETS),
}
ALONE = ("stock", "1x1")


def model():
    return language_model(schedule="cosine", schedule_steps=6, warmup_steps=1)


def fit(topology, path, epochs, ckpt_path=None, plugins=(), make=model):
    """Epochs of two optimizer steps on the same global batches; writes a checkpoint at the end."""
    alone = topology in ALONE
    trainer = quiet(
        TOPOLOGIES[topology](),
        devices=1 if alone else 2,
        max_epochs=epochs,
        accumulate_grad_batches=2 if alone else 1,
        plugins=[plugin() for plugin in plugins],
    )
    trainer.fit(make(), own_batches(sentences(4)), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)


def run(workers, topology, *args, **kwargs):
    if topology in ALONE:
        fit(topology, *args, **kwargs)
    else:
        workers(2).run(fit, topology, *args, **kwargs)


@pytest.fixture(scope="module")
def files(workers, tmp_path_factory):
    """Checkpoints of each topology after the first and after the third epoch, as ``{(topology, epochs): path}``."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {(name, epochs): folder / f"{name}-{epochs}.ckpt" for name in TOPOLOGIES for epochs in (1, 3)}
    for (name, epochs), path in paths.items():
        run(workers, name, path, epochs)
    return paths


def load(path):
    return torch.load(path, weights_only=True)


def assert_equal(left, right, exactly):
    tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(left["state_dict"], right["state_dict"], **tolerance)
    (ours,), (theirs,) = left["optimizer_states"], right["optimizer_states"]
    torch.testing.assert_close(ours["state"], theirs["state"], **tolerance)
    assert ours["param_groups"] == theirs["param_groups"]
    assert left["lr_schedulers"] == right["lr_schedulers"]
    assert left["global_step"] == right["global_step"] == 6


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(workers, files, tmp_path, topology):
    run(workers, topology, tmp_path / "resumed.ckpt", 3, ckpt_path=files[topology, 1])
    assert_equal(load(tmp_path / "resumed.ckpt"), load(files[topology, 3]), exactly=True)


CROSSINGS = [
    ("1x1", "1x2"),
    ("1x2", "1x1"),
    ("1x2", "2x1"),
    ("2x1", "1x1"),
    ("2x1", "1x2"),
    ("2x1", "2x1 replicated"),
    ("2x1 replicated", "2x1"),
    ("stock", "1x2"),
    ("1x2", "stock"),
]


@pytest.mark.parametrize(("writer", "reader"), CROSSINGS)
def test_a_run_goes_on_with_another_topology(workers, files, tmp_path, writer, reader):
    run(workers, reader, tmp_path / "resumed.ckpt", 3, ckpt_path=files[writer, 1])
    assert_equal(load(tmp_path / "resumed.ckpt"), load(files["1x1", 3]), exactly=False)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_file_is_what_a_plain_process_can_load(files, topology):
    checkpoint = load(files[topology, 1])
    module = OLMoE.load_from_checkpoint(files[topology, 1], weights_only=True)
    assert same(dict(module.state_dict()), checkpoint["state_dict"])
    assert module.model.blocks[0].moe.experts.w_down.shape[0] == CONFIG.num_experts
    plain = quiet("auto", devices=1)
    plain.strategy.connect(module)
    module.trainer = plain
    optimizer = module.configure_optimizers()["optimizer"]
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    for parameter in module.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
        assert optimizer.state[parameter]["step"] == 2


@pytest.mark.parametrize("topology", ["2x1", "1x2"])
def test_the_file_is_not_larger_than_lightnings_own(files, topology):
    random_states = 2 * 16_000  # of both processes; Lightning keeps none
    assert files[topology, 1].stat().st_size < 1.05 * files["stock", 1].stat().st_size + random_states


class SavesItself(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"by hand-{trainer.global_step}.ckpt")


def keep_all(folder, expert_parallel_size):
    strategy = Joined(expert_parallel_size=expert_parallel_size, bucket_megabytes=SMALL_BUCKETS)
    keep = ModelCheckpoint(folder, filename="callback-{step}", auto_insert_metric_name=False, every_n_train_steps=1)
    keep.save_top_k = -1
    trainer = quiet(strategy, callbacks=[SavesItself(folder), keep], enable_checkpointing=True, logger=False)
    trainer.fit(model(), own_batches(sentences(4)))
    trainer.test(trainer.lightning_module, own_batches(sentences(2)), verbose=False)
    trainer.save_checkpoint(folder / "after test.ckpt")
    return keep.best_model_path


def test_checkpoints_in_the_middle_and_after_a_test_are_complete(workers, tmp_path):
    best, other = workers(2).run(keep_all, tmp_path, 2)
    assert best == other
    for step in (1, 2):
        by_hand, by_callback = load(tmp_path / f"by hand-{step}.ckpt"), load(tmp_path / f"callback-{step}.ckpt")
        assert same(by_hand["state_dict"], by_callback["state_dict"])
        assert by_hand["state_dict"]["model.blocks.0.moe.experts.w_down"].shape[0] == CONFIG.num_experts
    after = load(tmp_path / "after test.ckpt")
    assert same(after["state_dict"], by_callback["state_dict"])
    (ours,), (theirs,) = after["optimizer_states"], by_callback["optimizer_states"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)


def evaluate(path, expert_parallel_size):
    trainer = quiet(Joined(expert_parallel_size=expert_parallel_size))
    return trainer.test(model(), own_batches(sentences(4)), ckpt_path=path, verbose=False)[0]["test/loss"]


def test_test_reads_a_checkpoint_of_another_topology(workers, files):
    trainer = quiet("auto", devices=1)
    (alone,) = trainer.test(model(), own_batches(sentences(4)), ckpt_path=files["1x1", 3], verbose=False)
    for loss in workers(2).run(evaluate, files["2x1", 3], 2):
        assert loss == pytest.approx(alone["test/loss"], rel=1e-5)


# ---------------------------------------------------------------------------------------------- bf16


def is_rounded(value):
    return torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("topology", ["1x1", "2x1", "1x2"])
def test_bf16_runs_save_their_fp32_masters(workers, tmp_path, topology):
    run(workers, topology, tmp_path / "bf16.ckpt", 1, plugins=[BF16Precision])
    for name, value in load(tmp_path / "bf16.ckpt")["state_dict"].items():
        assert value.dtype == torch.float32, name
        assert name.endswith(("norm.weight", "selection_bias")) or not is_rounded(value), name


@pytest.mark.parametrize("topology", ["1x1", "1x2"])
def test_a_resumed_bf16_run_is_bit_equal(workers, tmp_path, topology):
    run(workers, topology, tmp_path / "first.ckpt", 1, plugins=[BF16Precision])
    run(workers, topology, tmp_path / "whole.ckpt", 3, plugins=[BF16Precision])
    run(workers, topology, tmp_path / "again.ckpt", 3, plugins=[BF16Precision], ckpt_path=tmp_path / "first.ckpt")
    assert_equal(load(tmp_path / "again.ckpt"), load(tmp_path / "whole.ckpt"), exactly=True)


def tie(module):
    module.blocks[2].weight = module.blocks[0].weight


def save_tied(path):
    trainer = quiet(Joined(), plugins=[BF16Precision()])
    trainer.fit(Dense(change=tie), own_batches(vectors(4)))
    trainer.save_checkpoint(path)


def test_both_names_of_a_tied_weight_hold_its_master(workers, tmp_path):
    workers(2).run(save_tied, tmp_path / "tied.ckpt")
    state = load(tmp_path / "tied.ckpt")["state_dict"]
    assert not is_rounded(state["blocks.0.weight"])
    assert torch.equal(state["blocks.2.weight"], state["blocks.0.weight"])


def fit_bf16_twice(folder):
    module = Dense()
    for number in range(2):
        trainer = quiet(Joined(), plugins=[BF16Precision()], limit_train_batches=1 - number)
        trainer.fit(module, own_batches(vectors(2)))
        trainer.save_checkpoint(folder / f"{number}.ckpt")


def test_a_second_fit_of_a_bf16_run_starts_from_its_masters(workers, tmp_path):
    workers(2).run(fit_bf16_twice, tmp_path)
    first, second = (load(tmp_path / f"{number}.ckpt")["state_dict"] for number in (0, 1))
    assert not is_rounded(first["first.weight"])
    assert torch.equal(second["first.weight"], first["first.weight"])


# ---------------------------------------------------------------------------------------------- awkward parameters


def add_temperature(module):
    module.temperature = nn.Parameter(torch.tensor(0.7))
    module.bias = nn.Parameter(torch.tensor([0.1]))


def heated(module, x, number):
    return module.loss(x) * module.temperature + module.bias.sum()


def fit_heated(path, epochs, strategy, devices, ckpt_path=None):
    module = Dense(change=add_temperature, step=heated)
    trainer = quiet(strategy, devices=devices, max_epochs=epochs, accumulate_grad_batches=3 - devices)
    trainer.fit(module, own_batches(vectors(4)), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path)


def fit_heated_twice(folder, devices):
    fit_heated(folder / f"{devices}-1.ckpt", 1, Joined(), devices)
    fit_heated(folder / f"{devices}-2.ckpt", 2, Joined(), devices, ckpt_path=folder / f"{devices}-1.ckpt")


@pytest.mark.parametrize("devices", [1, 2])
def test_parameters_of_one_element_keep_the_state_a_single_process_gives_them(workers, tmp_path, devices):
    if devices == 1:
        fit_heated_twice(tmp_path, 1)
    else:
        workers(2).run(fit_heated_twice, tmp_path, 2)
    for epochs in (1, 2):
        fit_heated(tmp_path / "stock.ckpt", epochs, "auto", 1)
        ours, theirs = load(tmp_path / f"{devices}-{epochs}.ckpt"), load(tmp_path / "stock.ckpt")
        tolerance = CLOSE | {"atol": 1e-5}  # AdamW on gradients near zero
        torch.testing.assert_close(
            ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"], **tolerance
        )
        torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], **tolerance)


class MoreExperts(WithExperts):
    def __init__(self):
        super().__init__()
        self.moe = type(self.moe)(CONFIG.replace(num_experts=8))
        for parameter in self.moe.parameters():
            nn.init.zeros_(parameter)


def read_wrong_experts(path, make):
    strategy = Joined(expert_parallel_size=2, bucket_megabytes=SMALL_BUCKETS)
    trainer = quiet(strategy)
    trainer.fit(WithExperts(), own_batches(vectors(2)))
    trainer.save_checkpoint(path)
    trainer = quiet(Joined(expert_parallel_size=2, bucket_megabytes=SMALL_BUCKETS), max_epochs=2)
    try:
        trainer.fit(MoreExperts(), own_batches(vectors(2)), ckpt_path=path)
    except ValueError as error:
        return str(error)
    return f"no error on rank {rank_and_size()[0]}"


def test_another_number_of_experts_is_a_sentence_with_both(workers, tmp_path):
    for message in workers(2).run(read_wrong_experts, tmp_path / "four.ckpt", None):
        assert "the checkpoint holds 4 experts" in message
        assert "2 expert-parallel ranks x 4 experts are 8" in message
