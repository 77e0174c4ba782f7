import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.callbacks import RunManifest
from olmoe_lightning.checkpoint.manifest import (
    build_manifest,
    differences,
    git_state,
    nearest_preset,
    plain,
    write_json,
)
from olmoe_lightning.config import PRESETS, ModelConfig
from olmoe_lightning.plugins import BF16Precision


def strict(text: str):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_manifest_tells_model_trainer_data_and_versions(make_trainer, small_moe, random_tokens, tmp_path):
    callback, module = RunManifest(), small_moe()
    trainer = make_trainer(callback, max_steps=3, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, random_tokens())
    assert callback.path == tmp_path / "manifest.json"
    manifest = strict(callback.path.read_text())
    model = manifest["model"]
    assert ModelConfig.from_dict(model["config"]) == module.config
    assert model["preset"] == "tiny"
    assert model["difference_to_preset"]["num_experts"] == "16 -> 8"
    assert "top_k" not in model["difference_to_preset"]
    assert model["num_params"] == module.config.num_params
    assert model["num_active_params"] == module.config.num_active_params
    assert model["flops_per_token"] == module.config.flops_per_token(16)
    expected = {"max_steps": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "32-true"}
    assert expected.items() <= manifest["trainer"].items()
    assert manifest["data"] == random_tokens().fingerprint()
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["command"] == sys.argv
    assert manifest["time_utc"].endswith("+00:00")
    assert manifest["format"] == 1
    assert manifest["config"] is None  # no command started this
    alone = {"world_size": 1, "precision_plugin": "Precision"}
    assert {name: value for name, value in manifest["topology"].items() if value is not None} == alone
    assert [path.name for path in tmp_path.iterdir() if "manifest" in path.name] == ["manifest.json"]


class Keep(Callback):
    """A manifest as the strategy would build it for a checkpoint: on one rank, in the middle of training."""

    manifest = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            self.manifest = build_manifest(trainer, pl_module)


def topology_of(options, precision=None):
    tokens = torch.arange(17).repeat(4, 1)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
    config = ModelConfig.preset("tiny", vocab_size=32, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8)
    keep = Keep()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MoEStrategy(**options),
        plugins=[precision] if precision else None,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep],
    )
    trainer.fit(OLMoE(config), torch.utils.data.DataLoader([batch], batch_size=None))
    return keep.manifest and keep.manifest["topology"]


def test_topology_tells_how_the_work_was_shared(workers):
    pipeline = {"pipeline_parallel_size": 2, "schedule": "1f1b", "pipeline_split": [3, 1], "num_microbatches": 2}
    found, other = workers(2).run(topology_of, pipeline, BF16Precision())
    assert other is None
    assert found == {
        "world_size": 2,
        "pipeline": 2,
        "expert_replica": 1,
        "expert": 1,
        "schedule": "1f1b",
        "num_microbatches": 2,
        "stages_per_rank": 1,
        "stage_layers": [3, 1],
        "comm": "local",
        "shard_optimizer": True,
        "precision_plugin": "BF16Precision",
    }
    found, _ = workers(2).run(topology_of, {"expert_parallel_size": 2, "shard_optimizer": False})
    expected = {"pipeline": 1, "expert_replica": 1, "expert": 2, "comm": "all_to_all", "shard_optimizer": False}
    assert expected.items() <= found.items()
    assert found["schedule"] is found["num_microbatches"] is found["stage_layers"] is None


def test_differences_name_each_value_that_changed_and_only_those():
    then = {"a": 1, "b": {"c": [1, 2], "path": "x"}, "old": None}
    now = {"a": 1, "b": {"c": [1, 3, 4], "path": "y"}}
    assert differences(then, now, ignore=("path",)) == ["b.c.1: 2 -> 3", "b.c.2: none -> 4"]
    assert differences(then, then) == []


def test_every_preset_is_nearest_to_itself():
    for name, config in PRESETS.items():
        assert nearest_preset(config) == (name, {})


def test_a_changed_preset_shows_the_change():
    config = ModelConfig.preset("olmoe-1b-7b", top_k=4, num_layers=8)
    assert nearest_preset(config) == ("olmoe-1b-7b", {"num_layers": (16, 8), "top_k": (8, 4)})


def test_git_state_is_commit_and_dirty_flag_and_none_outside_a_checkout(tmp_path):
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("one")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {"commit": state["commit"], "dirty": True}


def test_git_state_is_none_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_plain_makes_json_of_what_settings_contain(tmp_path):
    value = {1: (np.int64(3), torch.tensor(0.5)), "nan": float("nan"), "path": tmp_path, "dtype": torch.bfloat16}
    assert strict(json.dumps(plain(value), allow_nan=False)) == {
        "1": [3, 0.5],
        "nan": None,
        "path": str(tmp_path),
        "dtype": "torch.bfloat16",
    }


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    write_json(path, {"run": 1})

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"run": 2})
    assert strict(path.read_text()) == {"run": 1}
    assert list(tmp_path.iterdir()) == [path]
