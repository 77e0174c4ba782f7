"""Real processes: started by Lightning, by torchrun, by SLURM's variables; what they say when it goes wrong."""

import contextlib
import datetime
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from strategy_lab import Dense, own_batches, quiet, vectors

from olmoe_lightning import MoEStrategy
from olmoe_lightning.tools.processes import PRELOAD, free_port, torchrun_environment, without_launcher
from olmoe_lightning.training.processes import connection_advice

HERE = Path(__file__).parent
PATIENCE = 120
"""Seconds until a launch is given up; the machine may be busy with other tests."""
TIMEOUT = 30 * 60
"""Seconds until a collective gives up; a process that ends long before has noticed that another one failed."""


def clean_environment(**more):
    """Ours without what some launcher may have left in it."""
    kept = without_launcher(os.environ)
    paths = os.pathsep.join([str(HERE), str(HERE.parent), kept.get("PYTHONPATH", "")])
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | {name: str(value) for name, value in more.items()}


# ---------------------------------------------------------------------------------------------- whole scripts


class Launch:
    """A script that is running, with its output in a file and its end noted."""

    def __init__(self, command, folder):
        folder.mkdir()
        self.folder, self.file = folder, folder / "output.txt"
        with self.file.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=clean_environment(MASTER_PORT=free_port()),
                start_new_session=True,
            )
        self.ended = 0.0
        self.waiter = threading.Thread(target=self._wait, daemon=True)
        self.waiter.start()

    def _wait(self):
        self.process.wait()
        self.ended = time.time()

    def finish(self):
        """Exit code and output."""
        self.waiter.join(PATIENCE)
        if self.waiter.is_alive():
            self.kill()
            pytest.fail(f"still running after {PATIENCE} s:\n{self.file.read_text()}")
        return self.process.returncode, self.file.read_text()

    def kill(self):
        """End the session that was started above."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """All scripts, started together: most of their time they wait for each other, or import."""
    folder = tmp_path_factory.mktemp("launches")
    script = str(HERE / "launched.py")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    commands = {
        "torchrun": [*torchrun, script],
        "first fails": [sys.executable, script],
        "last fails": [sys.executable, script],
    }
    running = {mode: Launch([*command, mode, str(folder / mode)], folder / mode) for mode, command in commands.items()}
    yield running
    for launch in running.values():
        launch.kill()


def test_a_plain_script_starts_its_own_processes(launches):
    """Its first fit is fine; in a second one a rank raises, see below."""
    for mode in ("first fails", "last fails"):
        _, output = launches[mode].finish()
        for rank in (0, 1):
            assert f"rank {rank} of 2 made 4 steps (LightningEnvironment" in output


def test_torchrun_starts_the_processes(launches):
    code, output = launches["torchrun"].finish()
    assert code == 0, output
    for rank in (0, 1):
        assert f"rank {rank} of 2 made 4 steps (TorchElasticEnvironment" in output


def test_another_number_of_devices_than_torchrun_started_is_refused_with_both(launches):
    _, output = launches["torchrun"].finish()
    assert re.search(r"refused: .*devices=4.*2", output), output


@pytest.mark.parametrize("mode", ["first fails", "last fails"])
def test_one_rank_that_raises_ends_all_long_before_the_timeout_and_shows_why(launches, mode):
    """Although callbacks want to save a checkpoint on the way down, which would need all ranks."""
    launch = launches[mode]
    code, output = launch.finish()
    rank = 0 if mode == "first fails" else 1
    assert code != 0
    assert "Traceback (most recent call last)" in output
    assert f"ZeroDivisionError: rank {rank} has had enough" in output
    assert f"rank {rank} of 2 (pipeline 0/1, expert_replica {rank}/2, expert 0/1) failed: ZeroDivisionError" in output
    (raised,) = re.findall(r"raised at (\S+)", output)
    assert launch.ended - float(raised) < PATIENCE < TIMEOUT
    processes = [int(pid) for pid in re.findall(r"process (\d+)", output)]
    assert len(processes) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.time() - float(raised) < PATIENCE, "a process is left"
        time.sleep(0.1)
    assert not list(launch.folder.glob("*.ckpt")), "a checkpoint without the other ranks' part was written"


# ---------------------------------------------------------------------------------------------- forked processes


def _process(environment, folder, options):
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(
        folder / f"rank{environment.get('RANK', environment.get('SLURM_PROCID'))}.txt", os.O_CREAT | os.O_WRONLY
    )
    os.dup2(file, 1)
    os.dup2(file, 2)
    trainer = quiet(MoEStrategy(timeout=datetime.timedelta(seconds=options["timeout"])), devices=2)
    module = Dense(step=raising if options["raising"] else None)
    trainer.fit(module, own_batches(vectors(4)))
    where = type(trainer.strategy.cluster_environment).__name__
    print(f"rank {trainer.global_rank} of {trainer.world_size} made {trainer.global_step} steps ({where})", flush=True)


def raising(module, x, number):
    if module.trainer.global_step == 2 and module.global_rank == 1:
        raise ZeroDivisionError("rank 1 has had enough")
    return module.loss(x)


def start(folder, environments, seconds=PATIENCE, timeout=60, raising=False):
    """Run a fit in one process for each environment; exit codes and outputs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    options = {"timeout": timeout, "raising": raising}
    processes = [
        context.Process(target=_process, args=(clean_environment(**environment), folder, options))
        for environment in environments
    ]
    begin = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(begin + seconds - time.monotonic(), 0.1))
    for process in processes:
        process.kill()
        process.join()
    texts = [path.read_text() for path in sorted(folder.glob("rank*.txt"))]
    return [process.exitcode for process in processes], texts


def test_slurm_starts_the_processes(tmp_path):
    job = {
        "SLURM_JOB_ID": 7,
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": 2,
        "SLURM_NTASKS_PER_NODE": 2,
        "SLURM_NNODES": 1,
        "SLURM_NODEID": 0,
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    environments = [job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in (0, 1)]
    codes, texts = start(tmp_path, environments)
    assert codes == [0, 0], texts
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 2 made 4 steps (SLURMEnvironment)" in text


def test_a_rank_that_raises_ends_those_that_no_launcher_looks_after(tmp_path):
    port = free_port()
    environments = [torchrun_environment(rank, 2, port) for rank in (0, 1)]
    codes, texts = start(tmp_path, environments, timeout=TIMEOUT, raising=True)
    assert codes == [1, 1], texts  # those that are killed after PATIENCE have -9
    assert "ZeroDivisionError: rank 1 has had enough" in texts[1]


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        codes, (text,) = start(tmp_path, [torchrun_environment(0, 2, port)], timeout=5)
    assert codes == [1]
    assert f"rank 0 of 2 could not join the others over gloo: another program uses 127.0.0.1:{port}" in text
    assert "set MASTER_PORT to a free port" in text


def test_a_missing_network_interface_is_named(tmp_path):
    port = free_port()
    environments = [torchrun_environment(rank, 2, port) | {"GLOO_SOCKET_IFNAME": "nonexistent0"} for rank in (0, 1)]
    codes, texts = start(tmp_path, environments)
    assert codes == [1, 1]
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 2 could not join the others over gloo: the network interface" in text
        assert "GLOO_SOCKET_IFNAME" in text


def test_processes_that_are_missing_are_named_after_the_timeout(tmp_path):
    port = free_port()
    codes, (text,) = start(tmp_path, [torchrun_environment(0, 2, port)], timeout=2)
    assert codes == [1]
    assert f"not all processes met at 127.0.0.1:{port}" in text


def test_other_errors_are_passed_on_with_the_place():
    assert connection_advice("something new", "host:1") == "see the cause above; the processes meet at host:1"
