"""The command's doors, called in this process: fit and what follows it, configuration files, tools, help."""

import csv
import json
import re

import pytest
import yaml
from tiny_model import TINY

from olmoe_lightning import ModelConfig
from olmoe_lightning.checkpoint.meta import KEY, read_meta
from olmoe_lightning.cli import TOOLS, main
from olmoe_lightning.module import OLMoE
from olmoe_lightning.strategy import MoEStrategy


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
    assert read_meta(resumed)["global_step"] == 6


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--trainer.max_steps=5", "--trainer.val_check_interval=2"], 5),
        (["--trainer.max_steps=3", "--trainer.limit_val_batches=0"], 3),
        (["--trainer.max_steps=9", "--trainer.limit_train_batches=2", "--trainer.max_epochs=2"], 4),
        (["--trainer.max_steps=4", "--trainer.callbacks.every_n_train_steps=100"], 4),
        (["--trainer.max_steps=4", "--trainer.callbacks.save_last=false", "--trainer.callbacks.every_n_epochs=7"], 4),
    ],
)
def test_the_end_of_a_run_is_in_a_checkpoint_whatever_the_intervals(config_file, monkeypatch, options, steps):
    settings = yaml.safe_load(config_file.read_text())
    settings["trainer"]["callbacks"].pop()  # options are for the last callback
    config_file.write_text(yaml.safe_dump(settings))
    options = [option.replace("callbacks.", "callbacks.init_args.") for option in options]
    assert main(["fit", "--config", str(config_file), *options]) == 0
    (folder,) = config_file.parent.glob("logs/run/version_*/checkpoints")
    assert max(read_meta(path)["global_step"] for path in folder.iterdir()) == steps


def test_one_process_has_the_strategy_of_many(config_file, monkeypatch):
    seen = []
    monkeypatch.setattr(OLMoE, "on_fit_start", lambda module: seen.append(module.trainer.strategy), raising=False)
    assert main(["fit", "--config", str(config_file)]) == 0
    (strategy,) = seen
    assert isinstance(strategy, MoEStrategy)
    assert strategy.world_size == 1


def spoil(monkeypatch, steps):
    """Make the losses of some steps no number."""
    step = OLMoE.training_step

    def spoiled(module, batch, batch_idx):
        output = step(module, batch, batch_idx)
        return output | {"loss": output["loss"] * float("nan")} if batch_idx in steps else output

    monkeypatch.setattr(OLMoE, "training_step", spoiled)


def test_a_run_in_which_every_step_is_skipped_fails_with_a_sentence(config_file, monkeypatch, capsys):
    spoil(monkeypatch, range(100))
    assert main(["fit", "--config", str(config_file)]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("olmoe-lightning: error: all 4 optimizer steps were skipped")
    assert "nothing was trained" in line


def test_a_run_in_which_a_step_is_skipped_ends_well(config_file, monkeypatch):
    spoil(monkeypatch, {0, 2})
    assert main(["fit", "--config", str(config_file)]) == 0
    (last,) = config_file.parent.glob("logs/run/version_*/checkpoints/last.ckpt")
    assert read_meta(last)[KEY]["skipped_steps"] == 2


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
