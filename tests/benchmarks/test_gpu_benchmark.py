"""The benchmark of the GPU kernels, on the CPU: it checks what it says, sees wrong kernels, and loses no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

gpu = pytest.importorskip("gpu")
pytest.importorskip("triton")

from _gpu_checks import difference  # noqa: E402
from _gpu_clock import Clock  # noqa: E402

SMOKE = ["--device", "cpu", "--smoke"]


def run(capsys, *arguments):
    """Exit status, JSON and everything else that was printed."""
    status = gpu.main([*SMOKE, *arguments])
    *table, line, _ = capsys.readouterr().out.split("\n")
    return status, json.loads(line), "\n".join(table)


@pytest.fixture
def no_interpreter(monkeypatch):
    """As without TRITON_INTERPRET: the CPU's own kernels, which are quick."""

    def refuse():
        raise RuntimeError

    monkeypatch.setattr(gpu, "interpreted_kernels", refuse)


@pytest.mark.usefixtures("no_interpreter")
def test_everything_runs_and_is_reported_twice(capsys, tmp_path):
    status, report, table = run(capsys, "--output", str(tmp_path / "gpu.json"))
    assert status == report["failed"] == 0
    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    assert report["errors"] == []
    assert all(check["passed"] and check["difference"] <= check["allowed"] for check in report["checks"])
    cases = {row["case"] for row in report["rows"]}
    for part in ("forward", "gradient of x", "gradient of w", "dispatch", "combine", "plan", "swiglu", "MoE layer"):
        assert any(part in case for case in cases), part
    for row in report["rows"]:
        assert 0 < row["seconds"]["q1"] <= row["seconds"]["q3"]
        assert row["rate"] > 0
        assert row["case"] in table
    assert {row["way"] for row in report["rows"]} >= {"ours", "F.grouped_mm", "loop", "cuBLAS, dense", "copy", "eager"}
    layers = [row for row in report["rows"] if row["case"].startswith("MoE layer")]
    assert {row["way"] for row in layers} == {"local", "rowwise", "loop over experts"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_triton_kernels_are_what_is_checked_when_they_are_interpreted(capsys, dtype):
    status, report, table = run(capsys, "--checks-only", "--only", dtype)
    assert status == 0, table
    assert report["machine"]["kernels"] == "Triton, interpreted"
    assert any(check["name"].startswith("grouped_mm in Triton") for check in report["checks"])


WRONG = {
    "a_row_too_much": lambda out: out + torch.eye(*out.shape, dtype=out.dtype),
    "nan_from_nobody": lambda out: out.index_fill(0, torch.tensor([len(out) - 1]), float("nan")),
    "another_dtype": lambda out: out.double(),
    "another_shape": lambda out: out[:-1],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_kernel_made_wrong_is_reported_and_fails(capsys, monkeypatch, wrong):
    from olmoe_lightning.kernels.gpu import rows

    right = rows.sum_rows
    monkeypatch.setattr(rows, "sum_rows", lambda *operands: wrong(right(*operands)))
    status, report, table = run(capsys, "--checks-only", "--only", "rowwise, memory of 2, float32")
    assert status == report["failed"] == 1
    assert [check["passed"] for check in report["checks"]] == [False]
    assert "FAILED" in table


def test_a_kernel_that_breaks_does_not_take_the_others_along(capsys, monkeypatch):
    from olmoe_lightning.kernels.gpu import permute

    def broken(*operands):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(permute, "gather_rows", broken)
    status, report, table = run(capsys, "--checks-only", "--only", "rows, float32")
    assert status == report["failed"] == 1
    assert "out of registers" in table
    status, report, _ = run(capsys, "--checks-only", "--only", "swiglu, float32")
    assert status == report["failed"] == 0


@pytest.mark.usefixtures("no_interpreter")
def test_a_case_that_breaks_is_an_error_and_the_others_are_timed(capsys, monkeypatch):
    def broken(*operands):
        raise ZeroDivisionError("no such thing")

    monkeypatch.setattr("_gpu_cases.swiglu", broken)
    status, report, table = run(capsys)
    assert status == report["failed"] == 1
    assert "no such thing" in table
    assert any("dispatch" in row["case"] for row in report["rows"])


@pytest.mark.usefixtures("no_interpreter")
def test_when_time_is_over_cases_are_left_out_by_name_but_checks_are_not(capsys):
    status, report, table = run(capsys, "--budget", "0")
    assert status == 0
    assert report["rows"] == []
    assert len(report["checks"]) > 10
    assert "left out: MoE layer" in table


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_all_kernels_hold_and_a_layer_never_waits_for_the_device():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, gpu.__file__, "--checks-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "never waits for the device" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(capsys):
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "no GPU" in said.err


def test_times_of_a_cpu_are_not_offered_as_results():
    with pytest.raises(SystemExit) as stopped:
        gpu.parse_arguments(["--device", "cpu"])
    assert stopped.value.code == 2


def test_the_difference_is_relative_and_nan_is_infinite():
    wanted = torch.tensor([100.0, -200.0])
    assert difference(torch.tensor([101.0, -200.0]), wanted) == pytest.approx(1 / 200)
    assert difference(wanted.clone(), wanted) == 0
    for wrong in (torch.tensor([float("nan"), -200.0]), wanted[:1], wanted.double()):
        assert difference(wrong, wanted) == float("inf")


def test_a_race_finds_how_many_times_faster(monkeypatch):
    now = [0.0]

    def work(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    race = Clock(torch.device("cpu"), seconds=0.01, least=5).race(
        {"once": lambda: work(1), "ten times": lambda: work(10)}
    )
    assert race.faster("once", "ten times") == pytest.approx(10)
