"""What does not fit is told, all of it, on every process; what fits loads, whoever wrote it."""

import pytest
import torch
from lightning.pytorch import Trainer
from test_any_topology import CONFIG, Model, train
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy
from olmoe_lightning.checkpoint.directory import CorruptCheckpoint
from olmoe_lightning.checkpoint.meta import KEY, META


def trainer(devices=1, **options):
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MoEStrategy(expert_parallel_size=devices, **options),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "one.ckpt"
    train("1x1x1", "fp32", 1, path)
    return path


class Unchecked(Model):
    """Does not compare its configuration with the checkpoint's, as OLMoE does, before any tensor is looked at."""

    def on_load_checkpoint(self, checkpoint):
        pass


def try_to_load(path, devices, **changes):
    try:
        trainer(devices).fit(Unchecked(CONFIG.replace(**changes)), ckpt_path=path)
    except CorruptCheckpoint as error:
        return str(error)
    return "nothing"


CHANGES = [
    (
        {"expert_hidden": 8},
        ["w_down is [4, 12, 7] there, [4, 12, 8] here", "w_gate_up is [4, 14, 12] there, [4, 16, 12]"],
    ),
    ({"num_experts": 8}, ["w_down is [4, 12, 7] there, [8, 12, 7] here", "router.weight is [4, 12] there, [8, 12]"]),
    ({"num_layers": 6}, ["missing: model.blocks.5.moe.experts.w_down"]),
    ({"num_layers": 4}, ["unexpected: model.blocks.4.moe.experts.w_down"]),
]


@pytest.mark.parametrize(("changes", "messages"), CHANGES)
def test_every_tensor_that_does_not_fit_is_named_on_all_processes(workers, path, changes, messages):
    alone = try_to_load(path, 1, **changes)
    for found in (alone, *workers(2).run(try_to_load, path, 2, **changes)):
        assert "does not fit the model" in found
        for message in messages:
            assert message in found


class Lenient(Unchecked):
    strict_loading = False


def test_a_module_may_allow_missing_and_unexpected_tensors_but_no_other_shapes(path):
    module = Lenient(CONFIG.replace(num_layers=6))
    trainer().validate(module, batches(), ckpt_path=path, verbose=False)
    with pytest.raises(CorruptCheckpoint, match=r"w_down is \[4, 12, 7\] there"):
        trainer().validate(Lenient(CONFIG.replace(expert_hidden=8)), batches(), ckpt_path=path, verbose=False)


def batches(count=1):
    tokens = torch.arange(32).view(2, 16) % 61
    return DataLoader([{"input_ids": tokens, "labels": tokens}] * count, batch_size=None)


def test_a_newer_format_is_refused_with_both_numbers(path, tmp_path):
    changed = tmp_path / "newer.ckpt"
    changed.mkdir()
    for file in path.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    meta = torch.load(changed / META, weights_only=True)
    meta[KEY]["format"] = 99
    torch.save(meta, changed / META)
    with pytest.raises(CorruptCheckpoint, match=r"checkpoint format 99, this version reads up to 2"):
        trainer().fit(Model(CONFIG), ckpt_path=changed)


def test_a_folder_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match=r"is no sharded checkpoint: it needs meta\.pt and \.metadata"):
        trainer().fit(Model(CONFIG), ckpt_path=tmp_path)


def save_weights(path):
    run = trainer(2)
    module = Model(CONFIG)
    run.fit(module)
    run.save_checkpoint(path, weights_only=True)
    return {name: value.clone() for name, value in module.state_dict().items() if "experts" not in name}


def test_weights_alone_are_a_checkpoint_to_evaluate(workers, tmp_path):
    first, _ = workers(2).run(save_weights, tmp_path / "weights.ckpt")
    module = Model(CONFIG)
    trainer().validate(module, batches(), ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    state = module.state_dict()
    for name, value in first.items():
        assert torch.equal(state[name], value), name
    assert state["model.blocks.1.moe.experts.w_down"].shape[0] == 4


def go_on(path, kind):
    run = trainer(2, state_dict_type=kind)
    run.fit(Model(CONFIG), ckpt_path=path)
    return run.global_step


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("writer", ["stock", "sharded", "full"])
def test_files_and_directories_load_under_either_setting(workers, path, tmp_path, writer, kind):
    if writer != "sharded":
        path = tmp_path / "file.ckpt"
        strategy = "auto" if writer == "stock" else MoEStrategy(state_dict_type="full")
        run = Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        run.fit(Model(CONFIG), batches(2))
        run.save_checkpoint(path)
        assert path.is_file()
    assert workers(2).run(go_on, path, kind) == [4, 4]
