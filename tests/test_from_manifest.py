"""``olmoe-lightning fit --from-manifest``: the same run again, what wins over it, what is said and what is refused."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from tiny_model import TINY

from olmoe_lightning.checkpoint.directory import index_of, read_range
from olmoe_lightning.cli import main

CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "run"}},
        "callbacks": [
            {"class_path": "RunManifest"},
            {"class_path": "ModelCheckpoint", "init_args": {"save_last": True}},
        ],
    },
    "model": {"config": TINY, "learning_rate": 0.01, "schedule": "constant"},
    "data": {"train": "tokens.npy", "seq_len": 32},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, token_files):
    """A directory with a YAML, tokens and a finished run of three steps; all paths in it are relative."""
    directory = tmp_path_factory.mktemp("finished")
    shutil.copy(token_files / "lower.npy", directory / "tokens.npy")
    (directory / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main(["fit", "--config", "tiny.yaml"]) == 0
    return directory


@pytest.fixture
def first(finished, tmp_path, monkeypatch):
    """The folder of a finished run, in a directory of its own that is the working one."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs" / "run" / "version_0"
    change(folder, directory=str(tmp_path))
    return folder


@pytest.fixture
def fit(first, capsys):
    """``fit(*options)``: exit status, lines on stderr that are ours, and the folder of the run (the newest)."""

    def run(*options):
        capsys.readouterr()
        status = main(["fit", *map(str, options)])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("olmoe-lightning: ")]
        newest = max(first.parent.iterdir(), key=lambda folder: int(folder.name.split("_")[1]))
        return status, [line.removeprefix("olmoe-lightning: ") for line in lines], newest

    return run


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def change(folder, **sections):
    """Write another manifest in the place of a run's; ``section={name: value}`` changes inner values."""
    values = manifest_of(folder)
    for name, value in sections.items():
        values[name] = values[name] | value if isinstance(value, dict) and values[name] else value
    (folder / "manifest.json").write_text(json.dumps(values))


def result(folder):
    """Weights, moments and losses of a run."""
    path = folder / "checkpoints" / "last.ckpt"
    saved = {name: read_range(path, name, 0, entry.size[0]) for name, entry in index_of(path).items()}
    with (folder / "metrics.csv").open() as file:
        losses = [row["train/loss"] for row in csv.DictReader(file) if row.get("train/loss")]
    assert len(losses) >= 3
    return saved, losses


def same(one, other):
    return one[1] == other[1] and all(torch.equal(value, other[0][name]) for name, value in one[0].items())


def test_a_repeated_run_is_bit_equal_and_has_a_folder_of_its_own(first, fit):
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    status, lines, second = fit("--from-manifest", first / "manifest.json")
    assert (status, lines, second.name) == (0, [], "version_1")
    assert same(result(first), result(second))
    assert manifest_of(second)["config"] == manifest_of(first)["config"]
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before

    _, _, third = fit(f"--from-manifest={second}", "--model.init_seed", "1")
    assert not same(result(first), result(third))  # else nothing above would have been seen


def test_the_folder_of_a_checkpoint_repeats_its_run(first, fit):
    (first / "manifest.json").unlink()
    status, _, second = fit("--from-manifest", first / "checkpoints" / "last.ckpt")
    assert status == 0
    assert same(result(first), result(second))


def test_the_manifest_holds_every_option_of_the_command(first):
    config = manifest_of(first)["config"]
    saved = yaml.safe_load((first / "config.yaml").read_text())
    assert config == saved
    assert {"seed_everything", "trainer", "model", "data", "ckpt_path"} <= set(config)


def test_options_and_configurations_behind_it_win_and_those_before_it_do_not(first, fit, tmp_path):
    (tmp_path / "more.yaml").write_text("trainer: {max_steps: 4}\nmodel: {learning_rate: 0.5}\n")
    more = ["--config", "more.yaml"]
    _, _, behind = fit("--from-manifest", first, *more, "--model.learning_rate", "0.02")
    _, _, before = fit(*more, "--from-manifest", first)
    chosen = [manifest_of(folder)["config"] for folder in (behind, before)]
    assert [config["trainer"]["max_steps"] for config in chosen] == [4, 3]
    assert [config["model"]["learning_rate"] for config in chosen] == [0.02, 0.01]


def test_a_number_that_json_cannot_say_is_kept(first, fit):
    options = ["--trainer.gradient_clip_val", ".inf"]
    _, _, second = fit("--from-manifest", first, *options)
    assert manifest_of(second)["config"]["trainer"]["gradient_clip_val"] == ".inf"
    status, _, third = fit("--from-manifest", second)
    assert status == 0
    assert yaml.safe_load((third / "config.yaml").read_text())["trainer"]["gradient_clip_val"] == float("inf")


def test_a_resumed_run_starts_from_the_same_checkpoint_again(first, fit):
    last = first / "checkpoints" / "last.ckpt"
    _, _, second = fit("--from-manifest", first, "--ckpt_path", last, "--trainer.max_steps", "6")
    _, _, third = fit("--from-manifest", second)
    assert manifest_of(third)["config"]["ckpt_path"] == str(last)
    assert same(result(second), result(third))
    assert not same(result(first), result(third))


def test_the_last_checkpoint_of_then_is_named_in_the_manifest(fit):
    place = ["--trainer.callbacks.init_args.dirpath", "kept", "--ckpt_path", "last"]  # of the last callback
    _, _, started = fit("--config", "tiny.yaml", *place)
    _, _, resumed = fit("--config", "tiny.yaml", *place, "--trainer.max_steps", "6")
    assert manifest_of(started)["config"]["ckpt_path"] is None  # there was none
    assert manifest_of(resumed)["config"]["ckpt_path"].endswith("kept/last.ckpt")


def test_settings_of_the_manifest_win_over_those_in_its_checkpoint(first, fit):
    last = first / "checkpoints" / "last.ckpt"
    options = ["--ckpt_path", last, "--trainer.max_steps", "6", "--model.schedule", "cosine"]  # the default
    _, _, second = fit("--from-manifest", first, *options)
    assert manifest_of(second)["config"]["model"]["schedule"] == "cosine"


def test_what_differs_from_then_is_told_one_line_each(first, fit):
    change(
        first,
        versions={"torch": "1.0", "lightning": "1.1", "olmoe_lightning": "0.0.1", "host": "elsewhere"},
        git={"commit": "abc", "dirty": False},
        trainer={"devices": 4},
        directory="/gone",
    )
    status, lines, _ = fit("--from-manifest", first)
    assert status == 0
    told = [line.removeprefix(f"not as in {first}: ") for line in lines]
    patterns = (r"olmoe_lightning: 0.0.1 -> \S+", r"torch: 1.0 -> \S+", r"lightning: 1.1 -> \S+")
    patterns += ("git: abc -> no checkout", r"directory: /gone -> \S+", "devices: 4 -> 1")
    assert len(told) == len(patterns)
    for pattern, line in zip(patterns, told, strict=True):
        assert re.fullmatch(pattern, line)


def test_other_data_is_refused_before_anything_is_trained(first, fit):
    tokens = np.load("tokens.npy")
    np.save("tokens.npy", tokens[::-1].copy())
    status, (line,), second = fit("--from-manifest", first)
    assert status == 2
    old = manifest_of(first)["data"]["sources"][0]["files"][0]["digest"]
    assert re.search(rf"sources\.0\.files\.0\.digest: {old} -> [0-9a-f]+; restore it, or", line)
    assert list(second.rglob("*.*")) == []

    status, (line,), _ = fit("--from-manifest", first, "--data.strict-resume", "false")
    assert status == 0
    assert line.startswith(f"not as in {first}: data sources.0.files.0.digest: {old} -> ")


def test_data_that_was_asked_for_is_told_and_a_moved_file_is_no_difference(first, fit, token_files):
    status, lines, _ = fit("--from-manifest", first, "--data.train", token_files / "upper.npy")
    assert status == 0
    assert any("digest" in line for line in lines)

    shutil.move("tokens.npy", "moved.npy")
    assert fit("--from-manifest", first, "--data.train", "moved.npy")[:2] == (0, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no manifest at given.json"),
        ("trainer: {max_steps: 3}\n", "given.json is not a manifest: it is not JSON"),
        ("[" * 100_000, "given.json is not a manifest: it is not JSON"),
        ("[1]", "given.json is not a manifest: it holds a list"),
        ("{}", "given.json holds no configuration of the command"),
        ('{"format": 1, "config": null}', "given.json holds no configuration of the command"),
        ('{"format": 2, "config": {}}', "has format 2, and this version of olmoe-lightning reads formats up to 1"),
        ('{"format": "x", "config": {}}', "has format 'x'"),
        ('{"format": 1, "config": {"model": {"gone": 1}}}', "given.json: Subcommand 'fit' does not accept option"),
        ('{"format": 1, "config": {"trainer": {"max_steps": "x"}}}', 'given.json: Parser key "trainer.max_steps"'),
    ],
)
def test_what_is_no_manifest_is_refused_in_one_line(text, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "given.json").write_text(text)
    assert main(["fit", "--from-manifest", "given.json"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("olmoe-lightning: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--from-manifest"], "needs a manifest.json"),
        (["fit", "--from-manifest", "--trainer.max_steps", "3"], "needs a manifest.json"),
        (["fit", "--from-manifest="], "needs a manifest.json"),
        (["fit", "--from-manifest", "."], ". holds no manifest.json"),
        (["fit", "--from-manifest", "a", "--from-manifest", "b"], "was given 2 times"),
        (["validate", "--from-manifest", "a"], "olmoe-lightning fit --from-manifest PATH"),
    ],
)
def test_a_wrong_use_is_refused_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("olmoe-lightning: error: ")
    assert message in line


def test_an_unreadable_manifest_and_a_checkpoint_file_are_refused(first, fit):
    torch.save({"state_dict": {}}, "file.ckpt")
    status, (line,), _ = fit("--from-manifest", "file.ckpt")
    assert (status, "is not a manifest: it is not JSON" in line) == (2, True)
    (first / "manifest.json").unlink()
    (first / "manifest.json").mkdir()  # permissions do not stop every user
    status, (line,), _ = fit("--from-manifest", first)
    assert (status, "cannot be read: Is a directory" in line) == (2, True)


def test_a_run_is_not_repeated_into_a_folder_that_holds_one(first, fit, tmp_path):
    options = ["--trainer.logger.init_args.version", "0"]
    status, (line,), _ = fit("--from-manifest", first, *options)
    assert status == 2
    assert "the repeated run would write into logs/run/version_0, where another run lies" in line
    status, lines, _ = fit("--from-manifest", first, "--trainer.logger", "false", "--trainer.default_root_dir", "new")
    assert (status, lines) == (0, [])
    assert (tmp_path / "new" / "manifest.json").is_file()


def test_help_of_fit_names_the_option(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert "--from-manifest PATH" in capsys.readouterr().out
