"""The benchmarks of several processes run and count right; small sizes, so the speeds mean nothing here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = "--d-model 32 --layers 2 --heads 2 --experts 4 --hidden 16 --top-k 2 --vocab 264 --seq-len 16 --tokens 128"


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_each_strategy_has_its_turns_and_bytes_follow_the_formula():
    text, results = run("parallel.py", "--rounds", "2", "--steps", "2", *SMALL.split())
    assert "Lightning ddp" in text
    assert set(results["speed"]) == {"moe", "moe_ep2", "ddp"}
    assert set(results["single"]) == {"moe", "auto"}
    for part in ("speed", "single"):
        for side in results[part].values():
            assert len(side["tokens_per_s"]["rounds"]) == 2
            assert side["tokens_per_s"]["median"] > 0
    for row in results["memory"]:
        for rank in row["by_rank"]:
            # The model is so small that batches and counters are some per cent of it.
            assert rank["measured"] == pytest.approx(rank["predicted"], rel=0.15)


@pytest.mark.slow
def test_expert_parallelism_is_timed_with_the_plugin_that_is_asked_for():
    text, results = run("parallel.py", "--part", "speed", "--comm", "rowwise", "--rounds", "1", "--steps", "1",
                        *SMALL.split())  # fmt: skip
    assert "comm rowwise" in text
    assert results["speed"]["moe_ep2"]["tokens_per_s"]["median"] > 0


@pytest.mark.slow
def test_a_layer_s_travel_is_timed_apart_from_its_experts():
    sizes = "--tokens 64 --d-model 16 --hidden 16 --experts 4 --top-k 2"
    text, results = run("rowwise.py", "--rounds", "2", *sizes.split())
    assert "dispatch + combine" in text
    assert set(results["travel"]["total"]) == {"rowwise", "all_to_all"}
    rounds = [results["travel"]["ratio"], results["layer"]["ratio"], results["experts_of_products"]]
    assert [len(each["rounds"]) for each in rounds] == [2, 2, 2]
    by_part = results["layer"]["parts"]["rowwise"]
    travel = [sum(part["rounds"][i] for name, part in by_part.items() if "experts" not in name) for i in range(2)]
    assert travel == pytest.approx(results["layer"]["total"]["rowwise"]["rounds"])


@pytest.mark.slow
def test_schedules_are_timed_beside_their_plan():
    text, results = run("pipeline.py", "--part", "measured", "--rounds", "1", "--steps", "1", "--rows", "1")
    assert "zbv_zero_bubble" in text
    for name, bubble in (("1f1b", 1 / 9), ("zbv_zero_bubble", 1 / 49)):
        measured = results["measured"][name]
        assert measured["bubble"] == pytest.approx(bubble)
        assert len(measured["ratio"]["rounds"]) == 1
        # No schedule is faster than its computations on the busier process; clocks of two processes differ a little.
        assert measured["ratio"]["median"] > 0.8
