"""SIGTERM to real processes, as a person, a scheduler or a launcher sends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch import HERE, PATIENCE, clean_environment

from olmoe_lightning.checkpoint.meta import read_meta
from olmoe_lightning.tools.processes import free_port


def start(folder):
    """Two processes under Lightning's launcher; their ids, once both are training."""
    environment = clean_environment(MASTER_PORT=free_port())
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "interrupted.py"), str(folder)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    files = [folder / f"rank{rank}.pid" for rank in (0, 1)]
    end = time.monotonic() + PATIENCE
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None, (folder / "output.txt").read_text()
        assert time.monotonic() < end, "it did not start"
        time.sleep(0.05)
    return process, [int(file.read_text()) for file in files]


@pytest.mark.parametrize(
    "to",
    [
        pytest.param((0,), id="the launching process"),
        pytest.param((1,), id="its child", marks=pytest.mark.slow),
        pytest.param((0, 1), id="both", marks=pytest.mark.slow),
    ],
)
def test_sigterm_from_outside_saves_and_ends_all_processes_with_status_0(tmp_path, to):
    process, pids = start(tmp_path)
    try:
        for rank in to:
            os.kill(pids[rank], signal.SIGTERM)
        status = process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, (tmp_path / "output.txt").read_text()
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{pids[1]}").exists():
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.05)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    assert read_meta(tmp_path / "checkpoints" / "last.ckpt")["global_step"] > 0
