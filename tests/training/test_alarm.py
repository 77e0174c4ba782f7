"""A process that stops, loops or fails ends all of its run within the timeout, with a stack of each."""

import contextlib
import ctypes
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from strategy_lab import Dense, own_batches, quiet, rank_and_size, vectors
from test_launch import PATIENCE, clean_environment

from olmoe_lightning import MoEStrategy
from olmoe_lightning._torch import group_timeout
from olmoe_lightning.parallel import Mesh, MeshShape
from olmoe_lightning.tools.processes import free_port
from olmoe_lightning.training import alarm

# ---------------------------------------------------------------------------------------------- timeouts


def timeouts(sizes):
    """Of every group of two runs."""
    found = []
    for seconds in (41, 43):
        strategy = MoEStrategy(**sizes, async_save=True, timeout=datetime.timedelta(seconds=seconds))
        trainer = quiet(strategy, max_steps=1)
        trainer.fit(Dense(), own_batches(vectors(4)))
        mesh = strategy.mesh
        axes = (
            mesh.world,
            mesh.pipeline,
            mesh.data,
            mesh.expert_replica,
            mesh.expert,
            strategy._saver._background_axis(),
        )
        found.append([group_timeout(axis.group).seconds for axis in axes if axis.group is not None])
    return found, [thread.name for thread in threading.enumerate() if thread.name == "alarm"]


def test_every_group_has_the_timeout_of_the_run(workers):
    for (first, second), threads in workers(2).run(timeouts, {}):
        assert len(first) == 4  # all, data, expert_replica, and that of saves
        assert set(first) == {41}
        assert set(second) == {43}
        assert threads == []


# ---------------------------------------------------------------------------------------------- a rank that stops


def stuck(kind):
    """Does not come back to the others."""
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop":
        while True:
            pass
    elif kind == "library":
        time.sleep(10**6)
    elif kind == "library with the lock":
        ctypes.PyDLL(None).sleep(10**6)


def script(kind, rank, folder):
    """A fit, since to start may take longer than a short timeout, and one in which one rank does not come back."""

    class Stuck(Dense):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                (folder / f"rank{self.global_rank}.pid").write_text(str(os.getpid()))
            if batch_idx == 3 and self.global_rank == rank:
                stuck(kind)

    quiet(MoEStrategy(), devices=2, max_steps=1).fit(Dense(), own_batches(vectors(1)))
    strategy = MoEStrategy(timeout=datetime.timedelta(seconds=5))
    quiet(strategy, devices=2, max_steps=100).fit(Stuck(), own_batches(vectors(200)))


LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank", "launcher"),
    [
        ("loop", 0, "lightning"),
        ("loop", 1, "lightning"),
        ("stopped", 0, "lightning"),
        ("stopped", 1, "lightning"),
        ("library", 1, "lightning"),
        ("library with the lock", 0, "lightning"),
        ("library with the lock", 1, "lightning"),
        ("loop", 1, "torchrun"),
        ("stopped", 0, "torchrun"),
    ],
)
def test_a_rank_that_does_not_come_back_ends_all_with_its_stack(tmp_path, kind, rank, launcher):
    port = str(free_port())
    command = [*LAUNCHERS[launcher], *(["--master-port", port] if launcher == "torchrun" else []), __file__]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, kind, str(rank), str(tmp_path)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=clean_environment(MASTER_PORT=port),
            start_new_session=True,
        )
    try:
        status = process.wait(PATIENCE)
        pids = [int((tmp_path / f"rank{each}.pid").read_text()) for each in (0, 1)]
        end = time.monotonic() + PATIENCE
        while left := [pid for pid in pids if alarm.state_of(pid) is not None]:
            assert time.monotonic() < end, f"processes {left} are left"
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = output.read_text()
    assert status != 0, text
    assert re.search(rf"rank {1 - rank} of 2 \(.*\) failed: RuntimeError: .*[Tt]imed out", text), text
    assert ", line" in text.split("in stuck")[0], text
    assert "in stuck" in text, text


# ---------------------------------------------------------------------------------------------- parts


def test_a_process_that_is_stopped_is_told_apart_and_ended():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + PATIENCE
        while alarm.state_of(process.pid) != "T":
            assert time.monotonic() < end
            time.sleep(0.01)
        alarm.end_processes([process.pid])
        assert process.wait(PATIENCE) == -signal.SIGABRT
        assert alarm.state_of(process.pid) is None
    finally:
        process.kill()


def heard(sounds):
    """What rank 1 does while rank 0 is, or is not, in trouble: it would print and end itself."""
    kept = alarm.STACK_SECONDS, alarm.END_SECONDS, alarm.show_stacks, os._exit
    done = []
    alarm.STACK_SECONDS = alarm.END_SECONDS = 0.05
    alarm.show_stacks = lambda: done.append("stacks")
    os._exit = done.append
    mesh = Mesh.create(MeshShape.of_world(2))
    watching = alarm.Alarm(mesh)
    begin = time.monotonic()
    try:
        if mesh.rank == 0 and sounds:
            watching.sound("rank 0 failed")
            return [], time.monotonic() - begin
        while sounds and len(done) < 2:
            time.sleep(0.01)
        dist.barrier() if not sounds else None
        return done[:2], 0.0
    finally:
        watching.close()
        alarm.STACK_SECONDS, alarm.END_SECONDS, alarm.show_stacks, os._exit = kept


def test_a_process_in_a_run_that_failed_shows_its_stacks_and_ends(workers):
    (_, waited), (done, _) = workers(2).run(heard, True)
    assert done == ["stacks", 1]
    assert waited < alarm.SILENT_SECONDS  # for the acknowledgement
    assert [found for found, _ in workers(2).run(heard, False)] == [[], []]


def one_fails():
    """Rank 0 raises when the other one is done with its run."""
    strategy = MoEStrategy()
    rank, _ = rank_and_size()
    module = Dense()
    if rank == 0:
        module.on_fit_end = fails
    begin = time.monotonic()
    with contextlib.suppress(ZeroDivisionError):
        quiet(strategy, max_steps=1).fit(module, own_batches(vectors(2)))
    dist.barrier()
    return time.monotonic() - begin


def fails():
    time.sleep(0.5)
    raise ZeroDivisionError("enough")


def test_a_process_whose_run_is_over_is_left_alone_and_nobody_waits_for_it(workers):
    assert max(workers(2).run(one_fails)) < alarm.SILENT_SECONDS


if __name__ == "__main__":
    script(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
