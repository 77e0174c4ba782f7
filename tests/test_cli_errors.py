"""Errors: one line and status 2 for what a user got wrong, the traceback for what is a bug."""

import subprocess
import sys

import pytest
import torch

from olmoe_lightning import ModelConfig, OLMoE
from olmoe_lightning.cli import TOOLS, is_users, main

SMALL = ["--trainer.accelerator", "cpu", "--trainer.max_steps", "1", "--trainer.logger", "false"]


def error_of(arguments, capsys):
    status = main(arguments)
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line.lower()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("olmoe-lightning: error: ")
    return status, lines[0].removeprefix("olmoe-lightning: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "'fly' is not a command; there are fit, validate"),
        (["fit", "--config", "missing.yaml"], "File does not exist"),
        (["fit", "--config", "broken.yaml"], "broken.yaml"),
        (["fit", "--config", "unknown.yaml"], "model.learning_rat"),
        (["fit", "--model.learning_rat", "1"], "unrecognized arguments: --model.learning_rat 1"),
        (["fit", "--model.learning_rate", "fast"], "Got value: fast"),
        (["fit", "--model.schedule", "linear"], "Got value: linear"),
        (["fit", *SMALL, "--model.config", "tinny"], "unknown preset 'tinny' (did you mean 'tiny'?)"),
        (["fit", *SMALL, "--model.overrides.top_k", "99"], "top_k (99) must not exceed num_experts (16)"),
        (["fit", *SMALL, "--model.overrides.topk", "2"], "'topk' is not a field of ModelConfig"),
        (["fit", *SMALL, "--model.overrides.vocab_size", "100"], "set the model's vocab_size to at least 258"),
        (["fit", *SMALL, "--data.seq_len", "4096"], "data's seq_len (4096) exceeds the model's max_seq_len (1024)"),
        (["fit", *SMALL, "--data.train", "gone.npy"], "gone.npy: no such token file"),
        (["fit", *SMALL, "--model.warmup_steps", "9"], "warm-up (9 steps) is longer than the schedule (1 steps)"),
        (["fit", *SMALL, "--model.pretrained", "gone"], "gone"),
        (["fit", "--trainer.strategy", "none", *SMALL], "invalid strategy name"),
        (["fit", *SMALL, "--trainer.precision", "12"], "trainer.precision"),
        (["fit", "--trainer.callbacks", "NoSuchThing"], "NoSuchThing"),
        (["validate", "--ckpt_path", "gone.ckpt", *SMALL[:2]], "gone.ckpt"),
        (["generate", "--checkpoint", "gone.ckpt"], "there is no checkpoint at gone.ckpt"),
        (["generate"], "arguments are required: checkpoint"),
        (["tokenize", "broken.jsonl", "--output", "a.npy"], "broken.jsonl: line 2 is not valid JSON"),
        (["tokenize", "gone.txt", "--output", "a.npy"], "gone.txt"),
        (["convert", "--to-hf", "x"], "exactly one source"),
        (["convert", "--from-hf", "gone", "--to-native", "x"], "gone"),
    ],
)
def test_a_users_error_is_one_line_and_status_two(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_stdlib_stand_in(monkeypatch, tmp_path)
    (tmp_path / "broken.yaml").write_text("trainer: {max_steps: 3\n")
    (tmp_path / "unknown.yaml").write_text("model: {learning_rat: 3}\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "good"}\n{"text": bad}\n')
    status, told = error_of(arguments, capsys)
    assert status == 2
    assert message in told


def write_stdlib_stand_in(monkeypatch, folder):
    """A small standard library, so that no test waits for the real one."""
    library = folder / "lib"
    library.mkdir()
    for number in range(60):
        (library / f"module{number}.py").write_text(f'"""Documentation of {number}."""\nvalue = {number}\n' * 90)
    import olmoe_lightning.data.corpus as corpus

    documents = corpus.stdlib_documents
    monkeypatch.setattr(corpus, "stdlib_documents", lambda root=None: documents(library))


def raised_by(function):
    with pytest.raises(Exception) as caught:  # any
        function()
    return caught.value


def test_errors_that_pytorch_or_python_raise_inside_of_our_frames_are_bugs(monkeypatch):
    module = OLMoE(ModelConfig.preset("tiny", num_layers=1, vocab_size=16))
    type_error = raised_by(lambda: module.update_selection_biases(None))
    value_error = raised_by(lambda: module.update_selection_biases(torch.zeros(5, 2)))  # of zip(strict=True)
    assert isinstance(type_error, TypeError)
    assert isinstance(value_error, ValueError)
    assert not is_users(type_error)
    assert not is_users(value_error)


def test_errors_that_we_raise_on_purpose_are_the_users():
    assert is_users(raised_by(lambda: ModelConfig.preset("none")))
    assert is_users(raised_by(lambda: OLMoE(learning_rate=-1.0)))


def test_complaints_of_the_kernels_and_the_model_are_bugs():
    from olmoe_lightning.kernels import grouped_mm

    error = raised_by(lambda: grouped_mm(torch.zeros(3), torch.zeros(3), torch.zeros(3)))
    assert isinstance(error, ValueError)
    assert not is_users(error)


def test_other_peoples_errors_keep_their_traceback():
    def theirs():
        raise ValueError("in a callback of the user's own")

    assert not is_users(raised_by(theirs))
    assert not is_users(raised_by(lambda: 1 / 0))


def test_a_missing_file_is_the_users_whoever_opened_it(tmp_path):
    assert is_users(raised_by(lambda: (tmp_path / "gone").read_text()))


def test_a_bug_in_a_tool_is_raised(monkeypatch):
    def broken(checkpoint: str) -> None:
        """Break.

        Args:
            checkpoint: anything.
        """
        len(checkpoint) + checkpoint

    broken.__module__ = "olmoe_lightning.cli"
    monkeypatch.setitem(TOOLS, "generate", broken)
    with pytest.raises(TypeError, match="unsupported operand"):
        main(["generate", "--checkpoint", "x"])


def test_a_process_ends_with_status_two_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "olmoe_lightning.cli", "convert", "--from-hf", "gone", "--to-native", "x"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
