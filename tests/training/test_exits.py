"""The end of a script right behind its last collective; `make exits` repeats what is slow here a hundred times."""

import sys
import time

import exits
import pytest
import torch
import torch.distributed as dist

from olmoe_lightning.parallel import at_exit


def looks_until_settled(*looks):
    """How often it looks at the threads before it is content, if it sees these states one after another."""
    seen = []

    def states():
        seen.append(None)
        return list(looks[min(len(seen), len(looks)) - 1])

    at_exit.settle(states)
    return len(seen)


def test_the_end_waits_for_threads_that_are_busy():
    assert looks_until_settled("SS") == 3
    assert looks_until_settled("RS", "SD", "SS") == 5
    assert looks_until_settled("SS", "SR", "SS") == 5  # idle must be seen several times in a row
    assert looks_until_settled("") == 3  # a system that does not show its threads


def test_the_end_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(at_exit, "_SECONDS", 0.05)
    assert looks_until_settled("R") > 3


def states_after_a_collective():
    dist.all_reduce(torch.ones(1))
    begin = time.monotonic()
    at_exit.settle()
    return at_exit.worker_states(), time.monotonic() - begin


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show their threads")
def test_threads_of_process_groups_are_found_and_idle(workers):
    for states, seconds in workers(2).run(states_after_a_collective):
        assert set(states) == {"S"}
        assert seconds < at_exit._SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("launcher", exits.LAUNCHERS)
def test_a_script_whose_last_line_is_fit_ends_cleanly(launcher):
    for each in exits.ends_of(2, list(exits.SCHEDULES), [launcher], ["5"], quiet=True):
        assert not each.bad, each.bad[0]
