"""The command's doors, called in this process: fit and what follows it, configuration files, tools, help."""

import csv
import json
import re

import pytest
import torch
import yaml
from tiny_model import TINY

from olmoe_lightning import ModelConfig
from olmoe_lightning.cli import TOOLS, main


@pytest.fixture
def config_file(tmp_path, token_files, monkeypatch):
    """A YAML for a run of four steps, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    config = {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 4,
            "val_check_interval": 2,
            "limit_val_batches": 1,
            "limit_test_batches": 1,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "run"}},
            "callbacks": [
                {"class_path": "ExpertLoadMonitor"},
                {"class_path": "olmoe_lightning.callbacks.ThroughputMonitor", "init_args": {"peak_tflops": 1.0}},
                {"class_path": "ModelCheckpoint", "init_args": {"save_last": True}},
                {"class_path": "NextSteps"},
            ],
        },
        "model": {"config": TINY, "learning_rate": 0.01},
        "data": {"train": str(token_files / "lower.npy"), "val": str(token_files / "upper.npy"), "seq_len": 32},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def run(config_file, capsys):
    """A finished fit; returns its folder of logs and its last checkpoint."""
    assert main(["fit", "--config", str(config_file)]) == 0
    capsys.readouterr()
    folder = config_file.parent / "logs" / "run" / "version_0"
    return folder, folder / "checkpoints" / "last.ckpt"


def test_fit_trains_and_says_what_to_do_next(config_file, capsys):
    assert main(["fit", "--config", str(config_file), "--model.learning-rate", "0.02"]) == 0
    printed = capsys.readouterr()
    assert "best validation loss" in printed.out
    assert re.search(r"olmoe-lightning'? generate --checkpoint \S+\.ckpt", printed.out)
    assert "FLOPs: 0" not in printed.out + printed.err
    assert "Tip" not in printed.err
    saved = yaml.safe_load((config_file.parent / "logs" / "run" / "version_0" / "config.yaml").read_text())
    assert saved["model"]["learning_rate"] == 0.02


def test_the_saved_configuration_runs_again_and_resumes(run):
    folder, last = run
    again = ["fit", "--config", str(folder / "config.yaml"), "--ckpt_path", str(last), "--trainer.max_steps", "6"]
    assert main(again) == 0
    resumed = folder.parent / "version_1" / "checkpoints" / "last.ckpt"
    assert torch.load(resumed, weights_only=True)["global_step"] == 6


def test_printed_configuration_is_complete_and_gives_itself_when_printed_again(config_file, capsys):
    with pytest.raises(SystemExit) as first:
        main(["fit", "--config", str(config_file), "--print_config"])
    text = capsys.readouterr().out
    (config_file.parent / "full.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["fit", "--config", "full.yaml", "--print_config"])
    assert first.value.code in (0, None)
    assert capsys.readouterr().out == text
    values = yaml.safe_load(text)
    assert ModelConfig.from_dict(values["model"]["config"]) == ModelConfig(**TINY)
    assert values["trainer"]["callbacks"][0]["class_path"] == "olmoe_lightning.callbacks.ExpertLoadMonitor"
    assert values["trainer"]["enable_model_summary"] is False


@pytest.mark.parametrize(("command", "prefix"), [("validate", "val"), ("test", "test")])
def test_evaluating_a_checkpoint_takes_the_model_from_it(run, config_file, command, prefix):
    folder, last = run
    values = yaml.safe_load(config_file.read_text())
    del values["model"]
    config_file.write_text(yaml.safe_dump(values))
    assert main([command, "--config", str(config_file), "--ckpt_path", str(last)]) == 0

    def losses(path, name):
        with (path / "metrics.csv").open() as file:
            return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]

    after_training = losses(folder, "val/loss")[-1]
    assert losses(folder.parent / "version_1", f"{prefix}/loss") == [pytest.approx(after_training, rel=1e-6)]


def test_on_a_resume_settings_that_were_given_win_over_the_checkpoints(run, config_file):
    _, last = run
    arguments = ["--ckpt_path", str(last), "--trainer.max_steps", "6", "--model.schedule", "wsd"]
    assert main(["fit", "--config", str(config_file), *arguments]) == 0
    saved = yaml.safe_load((config_file.parent / "logs" / "run" / "version_1" / "config.yaml").read_text())
    assert saved["model"]["schedule"] == "wsd"


def test_predict_writes_readable_continuations(run, config_file, capsys):
    folder, last = run
    arguments = ["--ckpt_path", str(last), "--trainer.limit_predict_batches", "1"]
    options = ["--model.generation.max_new_tokens", "5", "--model.generation.prompt_tokens", "20"]
    assert main(["predict", "--config", str(folder / "config.yaml"), *arguments, *options]) == 0
    path = folder.parent / "version_1" / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    assert all(set(line) == {"prompt", "written", "actual"} for line in lines)
    assert all(line["prompt"].isupper() for line in lines)  # of the held-out file
    assert "8 continuations: logs/run/version_1/predictions.jsonl" in capsys.readouterr().out


def test_generate_writes_the_same_text_for_the_same_seed(run, capsys):
    texts = []
    for seed in ("0", "0", "1"):
        assert (
            main(["generate", "--checkpoint", str(run[1]), "--prompt", "abc", "--max-new-tokens", "30", "--seed", seed])
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("abc")


def test_generate_shows_several_samples_apart(run, capsys):
    assert main(["generate", "--checkpoint", str(run[1]), "--num_samples", "2", "--max_new_tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("--- 1 of 2\n")


def test_text_to_tokens_to_training_to_text_with_a_bpe(config_file, tmp_path, capsys, caplog):
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    assert main(["tokenize", "a.txt", str(config_file), "--output", "tokens.npy", "--tokenizer", "bpe:280"]) != 0
    assert "tiny.yaml" in capsys.readouterr().err
    assert main(["tokenize", "a.txt", "--output", "tokens.npy", "--tokenizer", "bpe:262"]) == 0
    assert "tokens (uint16) of 1 documents" in caplog.text
    data = ["--data.train", "tokens.npy", "--data.val", "null", "--data.tokenizer", "tokens.tokenizer.json"]
    assert main(["fit", "--config", str(config_file), *data, "--trainer.limit_val_batches", "0"]) == 0
    last = "logs/run/version_0/checkpoints/last.ckpt"
    capsys.readouterr()
    assert main(["generate", "--checkpoint", last, "--prompt", "the cat"]) == 0  # the checkpoint knows its tokenizer
    assert capsys.readouterr().out.startswith("the cat")


def test_convert_takes_a_checkpoint_to_a_directory_that_generates_the_same(run, tmp_path, capsys):
    assert main(["convert", "--from-native", str(run[1]), "--to-native", "native"]) == 0
    capsys.readouterr()
    texts = []
    for checkpoint in (run[1], "native"):
        arguments = ["--tokenizer", "byte", "--prompt", "abc", "--temperature", "0"]
        assert main(["generate", "--checkpoint", str(checkpoint), *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_command_without_arguments_lists_all_commands(capsys):
    assert main([]) == 0
    usage = capsys.readouterr().out
    for name in ("fit", "validate", "test", "predict", *TOOLS):
        assert re.search(rf"^  {name}\b", usage, re.MULTILINE)
    assert len(usage.splitlines()) < 25


@pytest.mark.parametrize("command", ["fit", "predict", *TOOLS])
def test_every_option_is_documented(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert len(text.split("options:")[0].splitlines()) < 8  # the synopsis does not hide the options
    ours = re.findall(r"^  (--(?:model|data)\.\S+|--(?!trainer|model|data)\S+)(.*(?:\n {10,}.*)*)", text, re.MULTILINE)
    assert len(ours) >= 4
    undocumented = []
    for name, description in ours:
        words = re.sub(r"\((?:required, )?type:.*", "", " ".join(description.split()), flags=re.DOTALL)
        if not re.search(r"[a-z]{2,} [a-z]{2,}|[a-z]{4,}", words):
            undocumented.append(name)
    assert undocumented == []
