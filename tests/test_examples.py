"""Every file in examples/ runs, with a few steps."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from olmoe_lightning.checkpoint.meta import KEY, read_meta
from olmoe_lightning.cli import main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FEW = [
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=3",
    "--trainer.val_check_interval=1",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--model.overrides.num_layers=2",
]
SEVERAL = ("expert_parallel", "pipeline")
CHANGES = {"quickstart.yaml": ["--model.warmup_steps=1"], "mixture.yaml": ["--model.warmup_tokens=100"]}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The default corpus is made once, and not in the user's cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path, cache, monkeypatch):
    """An own folder to run in, with the text that mixture.yaml asks for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    prose = "One document about the weather, with rain in the north and sun in the south.\n"
    code = "def double(value):\n    return 2 * value\n"
    for name, text in (("notes", prose), ("source", code), ("held-out", prose + code)):
        (tmp_path / name).mkdir()
        for number in range(12):
            (tmp_path / name / f"{number}.txt").write_text(f"{number}\n" + text * (20 + number))
    tokenizer = "bpe:4096"
    for name, output in (("notes", "notes"), ("source", "source"), ("held-out", "val")):
        assert main(["tokenize", name, "--output", f"data/{output}.npy", "--tokenizer", tokenizer]) == 0
        tokenizer = "data/notes.tokenizer.json"
    return tmp_path


def test_there_is_a_test_for_every_example():
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == {*CHANGES, *(f"{name}.yaml" for name in SEVERAL)}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"train.py", "custom_comm_plugin.py"}


@pytest.mark.parametrize("name", CHANGES)
def test_yaml_example_trains_and_writes_checkpoint_logs_and_manifest(name, folder, capsys):
    assert main(["fit", "--config", str(EXAMPLES / name), *FEW, *CHANGES[name]]) == 0
    run = folder / "runs" / name.removesuffix(".yaml") / "version_0"
    assert {"config.yaml", "manifest.json", "checkpoints"} <= {path.name for path in run.iterdir()}
    assert list(run.glob("events.out.tfevents.*"))
    assert read_meta(run / "checkpoints" / "last.ckpt")["global_step"] == 3
    printed = capsys.readouterr().out
    assert "best validation loss" in printed
    assert ("The model continues" in printed) == (name == "quickstart.yaml")


@pytest.mark.parametrize("name", CHANGES)
def test_yaml_example_says_how_it_is_run(name):
    text = (EXAMPLES / name).read_text()
    assert f"olmoe-lightning fit --config examples/{name}" in text
    assert {"trainer", "model", "data"} <= set(yaml.safe_load(text))


def test_the_script_trains(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--max-steps", "2", "--val-batches", "1", "--root", "out"])
    runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    assert list((folder / "out").rglob("*.ckpt"))
    assert "The model continues" in capsys.readouterr().out


@pytest.mark.slow
def test_the_plugin_of_the_example_conforms(tmp_path):
    script = [sys.executable, str(EXAMPLES / "custom_comm_plugin.py")]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert re.search(r"(\d+) of \1 cases passed", done.stdout), done.stdout + done.stderr
    assert done.returncode == 0


def as_a_user(command, folder):
    """Run in a process of its own, which may start others."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "expert_parallel")) for name in SEVERAL]
)
def test_an_example_of_several_processes_trains(name, folder):
    command = [sys.executable, "-m", "olmoe_lightning.cli", "fit", "--config", str(EXAMPLES / f"{name}.yaml")]
    printed = as_a_user([*command, *FEW, "--model.warmup_steps=1", "--trainer.num_sanity_val_steps=0"], folder)
    assert "best validation loss" in printed
    run = folder / "runs" / name / "version_0"
    checkpoint = read_meta(run / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == 3
    experts, *_ = checkpoint[KEY]["shapes"]["model.blocks.0.moe.experts.w_gate_up"]
    assert experts == checkpoint["hyper_parameters"]["config"]["num_experts"]


def snippets():
    return [part.split("```")[0] for part in (EXAMPLES.parent / "README.md").read_text().split("```python\n")[1:]]


def test_the_snippet_of_the_readme_runs_on_four_processes(folder):
    snippet = snippets()[1]
    assert "devices=4" in snippet
    snippet, replaced = re.subn(r"max_steps=\d+", "max_steps=2, limit_val_batches=1", snippet)
    assert replaced == 1  # else this would train for minutes
    (folder / "snippet.py").write_text(snippet)
    printed = as_a_user([sys.executable, "snippet.py"], folder)
    assert "`max_steps=2` reached" in printed
    assert list((folder / "lightning_logs").rglob("*.ckpt"))


def test_the_snippet_of_the_readme_runs(folder):
    snippet = snippets()[0]
    assert "trainer.fit(" in snippet
    few = "max_steps=2, limit_val_batches=1, enable_progress_bar=False"
    snippet, replaced = re.subn(r"max_steps=\d+", few, snippet.replace('accelerator="auto"', 'accelerator="cpu"'))
    assert replaced == 1  # else this would train for minutes
    exec(compile(snippet, "README.md", "exec"), {})
