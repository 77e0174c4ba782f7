"""The benchmark of checkpoints runs and counts right; small sizes, so the speeds mean nothing here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"
SMALL = "--d-model 64 --layers 2 --heads 2 --experts 4 --hidden 64 --vocab 264 --rounds 2"


@pytest.mark.slow
def test_saves_and_loads_are_measured_against_plain_ones(tmp_path):
    command = [sys.executable, str(SCRIPT), *SMALL.split(), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    speed = results["speed"]
    for name in ("save_bandwidth_over_plain", "load_bandwidth_over_plain", "async_blocked_over_sync"):
        assert len(speed[name]["rounds"]) == 2
        assert speed[name]["low"] > 0
        assert "ratio" in done.stdout
    for precision in ("fp32", "bf16"):
        disk = speed["on_disk"][precision]
        assert disk["parameters"] * 12 <= speed["bytes"] < disk["bytes"]  # buffers and counters besides
    for found in results["memory"]:
        assert found["shard"] == pytest.approx(speed["bytes"] / 2, rel=0.2)
    assert list(tmp_path.iterdir()) == []  # nothing stays


def test_sizes_that_cannot_be_shared_are_refused_with_the_number():
    command = [sys.executable, str(SCRIPT), "--experts", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "--experts (3)" in done.stderr
