"""The commands take a checkpoint's directory where they take a file: settings, evaluation, resuming, messages."""

import shutil

import pytest
import yaml
from tiny_model import TINY

from olmoe_lightning import OLMoE
from olmoe_lightning.checkpoint.meta import KEY, read_meta
from olmoe_lightning.cli import main

TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "strategy": "moe",
    "max_steps": 2,
    "limit_val_batches": 2,
    "enable_progress_bar": False,
    "logger": False,
}
KEEP = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "kept", "save_last": True}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, token_files):
    directory = tmp_path_factory.mktemp("finished")
    shutil.copy(token_files / "lower.npy", directory / "tokens.npy")
    data = {"train": "tokens.npy", "val": "tokens.npy", "seq_len": 32}
    model = {"config": TINY, "learning_rate": 0.02, "schedule": "constant"}
    run = {"trainer": TRAINER | {"callbacks": [KEEP]}, "model": model, "data": data}
    (directory / "fit.yaml").write_text(yaml.safe_dump(run))
    (directory / "bare.yaml").write_text(yaml.safe_dump({"trainer": TRAINER, "data": data}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main(["fit", "--config", "fit.yaml"]) == 0
    assert (directory / "kept" / "last.ckpt").is_dir()
    return directory


@pytest.fixture(autouse=True)
def _here(finished, monkeypatch):
    monkeypatch.chdir(finished)


def test_validate_takes_the_models_settings_from_the_directory():
    command = ["validate", "--config", "bare.yaml", "--ckpt_path", "kept/last.ckpt"]
    assert main(command) == 0  # the default model is another one, and would be refused
    assert main([*command, "--model.overrides", "{d_model: 64}"]) == 2


def test_a_run_is_resumed_from_the_directory_with_its_settings(finished):
    assert main(["fit", "--config", "bare.yaml", "--ckpt_path", "kept/last.ckpt", "--trainer.max_steps", "3"]) == 0
    (written,) = (finished / "checkpoints").glob("*step=3.ckpt")
    assert OLMoE.load_from_checkpoint(written).hparams.learning_rate == 0.02
    assert next(iter(read_meta(written)[KEY]["scalars"].values()))["step"] == 3


def test_weights_alone_are_not_resumed_and_the_message_says_what_to_do(capsys):
    assert main(["convert", "--from-native", "kept/last.ckpt", "--to-sharded", "weights.ckpt"]) == 0
    assert main(["fit", "--config", "bare.yaml", "--ckpt_path", "weights.ckpt"]) == 2
    assert "--model.pretrained" in capsys.readouterr().err
    assert main(["fit", "--config", "fit.yaml", "--model.pretrained", "weights.ckpt"]) == 0


def test_another_kind_of_folder_is_one_line(capsys):
    assert main(["fit", "--config", "bare.yaml", "--ckpt_path", "kept"]) == 2
    error = capsys.readouterr().err
    assert "kept is no sharded checkpoint" in error
    assert "Traceback" not in error
