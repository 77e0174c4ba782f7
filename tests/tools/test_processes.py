"""The worker processes that other tests rely on: they answer, and tell what went wrong instead of hanging."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from olmoe_lightning.tools import processes
from olmoe_lightning.tools.processes import GROUP_TIMEOUT, WorkerError


def rank_and_sum(offset, scale=1):
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank() * scale, total


def environment():
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_num_threads(2)
    elastic = TorchElasticEnvironment()
    found = TorchElasticEnvironment.detect(), elastic.world_size(), elastic.global_rank(), elastic.local_rank()
    return found, os.environ["OMP_NUM_THREADS"]


def what_is_left():
    return "LEFT_BEHIND" in os.environ, torch.get_num_threads(), os.getpid()


def one_raises(others_wait):
    if dist.get_rank() == 1:
        raise ValueError("no rows for expert 7")
    if others_wait:
        dist.all_reduce(torch.zeros(1))


def one_sleeps():
    if dist.get_rank() == 0:
        time.sleep(60)


def one_ends():
    if dist.get_rank() == 1:
        os._exit(13)


def end_group():
    dist.destroy_process_group()
    return os.getpid()


def child_of_worker():
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return process.exitcode


def test_results_come_in_rank_order_and_from_one_group(workers):
    results = workers(2).run(rank_and_sum, 10, scale=3)
    assert results == [(0, torch.tensor([21.0])), (3, torch.tensor([21.0]))]


def test_workers_look_like_those_of_torchrun_and_are_left_as_they_were(workers):
    assert workers(2).run(environment) == [((True, 2, rank, rank), "1") for rank in range(2)]
    left = workers(2).run(what_is_left)
    assert [part[:2] for part in left] == [(False, 1)] * 2
    assert [part[2] for part in left] == workers(2).pids


def test_workers_are_where_the_test_is(workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert workers(2).run(os.getcwd) == [str(tmp_path)] * 2


def test_a_worker_may_have_children(workers):
    assert workers(2).run(child_of_worker) == [0, 0]


@pytest.mark.parametrize("others_wait", [False, True])
def test_the_traceback_of_the_rank_that_raises_is_shown_first(workers, others_wait):
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        workers(2).run(one_raises, others_wait)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed:\nTraceback")
    assert "in one_raises" in text
    assert "ValueError: no rows for expert 7" in text
    assert ("rank 0 failed after it" in text) == others_wait
    assert time.monotonic() - start < GROUP_TIMEOUT.total_seconds() / 2  # not by the group's timeout
    assert workers(2).pids == []


def test_a_rank_that_hangs_is_shown_where_it_hangs_and_the_next_run_has_new_processes(workers):
    workers(2).run(what_is_left)
    before = workers(2).pids
    with pytest.raises(WorkerError, match=r"no answer from ranks \[0\] of 2 within 0.3 s") as caught:
        workers(2).run(one_sleeps, timeout=0.3)
    assert "in one_sleeps" in str(caught.value)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    with pytest.raises(WorkerError, match="rank 1 of 2 failed:\nthe process ended with exit code 13 and no answer"):
        workers(2).run(one_ends)
    assert {part[2] for part in workers(2).run(what_is_left)}.isdisjoint(before)


def test_a_function_may_end_the_process_group(workers):
    before = workers(2).run(end_group)
    assert [part[2] for part in workers(2).run(what_is_left)] != before


def test_workers_end_with_the_process_that_started_them():
    code = (
        "import os\n"
        "from processes import Workers\n"  # without the package, which takes seconds to import
        "if __name__ == '__main__':\n"
        "    pool = Workers(2, preload=['torch'])\n"
        "    pool.run(os.getpid)\n"
        "    print(*pool.pids, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(processes.__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
