"""The benchmark's arithmetic, that it compares equal work, and that its command runs at toy sizes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOY = {
    "d-model": 32,
    "layers": 1,
    "heads": 2,
    "hidden": 16,
    "top-k": 2,
    "vocab": 300,
    "seq-len": 32,
    "tokens": 64,
    "threads": 1,
}


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch):
    """The scripts import each other as they do when one of them is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def toy_arguments(*more: str) -> list[str]:
    return [part for name, value in TOY.items() for part in (f"--{name}", str(value))] + list(more)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_summary_has_median_quartiles_and_extremes():
    from _timing import summarize

    summary = summarize([4.0, 1.0, 3.0, 2.0, 10.0])
    assert (summary.median, summary.q1, summary.q3, summary.low, summary.high) == (3.0, 2.0, 4.0, 1.0, 10.0)
    assert summary.rounds == (4.0, 1.0, 3.0, 2.0, 10.0)
    single = summarize([7.0])
    assert single.q1 == single.median == single.q3 == 7.0
    with pytest.raises(ValueError, match="0 rounds"):
        summarize([])


def test_ratio_is_the_median_of_pairs_not_the_ratio_of_medians():
    from _timing import paired_ratios

    # The machine slows down by ten after the second round: pairs do not notice.
    ratio = paired_ratios([20.0, 22.0, 2.2], [10.0, 10.0, 1.0])
    assert ratio.rounds == pytest.approx((2.0, 2.2, 2.2))
    assert ratio.median == pytest.approx(2.2)
    with pytest.raises(ValueError, match="2 and 1 rounds"):
        paired_ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize("sides", [["a", "b"], ["a", "b", "c"]])
def test_each_side_goes_first_equally_often(sides):
    from _timing import turn_order

    orders = [turn_order(sides, index) for index in range(2 * len(sides))]
    assert sorted(order[0] for order in orders) == sorted(2 * sides)
    assert all(sorted(order) == sides for order in orders)


def test_peer_figures_divide_by_the_peak_of_the_same_round():
    from train_step import peer_figures

    figures = peer_figures(
        {"ours": [300.0, 30.0], "transformers": [200.0, 20.0]},
        [{"flops": 1000.0, "shape": "a"}, {"flops": 100.0, "shape": "b"}],
        flops_per_token=2.0,
    )
    assert figures["sides"]["ours"]["of_peak"]["rounds"] == pytest.approx((0.6, 0.6))
    assert figures["sides"]["ours"]["of_best_peak"] == pytest.approx(165 * 2 / 1000)
    assert figures["sides"]["transformers"]["ours_over_it"]["median"] == pytest.approx(1.5)
    assert "ours_over_it" not in figures["sides"]["ours"]
    assert figures["peak"]["shape"] == "a"


def test_scaling_is_relative_to_the_first_count():
    from train_step import scaling_figures

    rows = scaling_figures({8: [100.0, 50.0], 128: [96.0, 48.0]})["by_experts"]
    assert [(row["experts"], row["relative"]["median"]) for row in rows] == [(8, 1.0), (128, pytest.approx(0.96))]


def test_overhead_is_percent_over_the_bare_loop():
    from train_step import overhead_figures

    figures = overhead_figures({"bare": [1.0, 2.0], "trainer": [1.02, 2.04], "trainer_bar": [1.0, 2.0]})
    assert figures["trainer_overhead_percent"]["median"] == pytest.approx(2.0)
    assert figures["trainer_bar_overhead_percent"]["median"] == pytest.approx(0.0)
    assert figures["step_ms"]["bare"]["median"] == pytest.approx(1500)


def test_a_busy_machine_is_warned_about(monkeypatch):
    import _machine

    monkeypatch.setattr(_machine, "cores", lambda: 4)
    assert _machine.busy_warning(load=0.3, others=0.1) is None
    assert _machine.busy_warning(load=None, others=None) is None
    assert "2.5 of 4 cores" in _machine.busy_warning(load=0.3, others=2.5)
    assert "3.00 on 4 cores" in _machine.busy_warning(load=3.0, others=0.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "100", "--seq-len", "64"], "--tokens (100) must be a multiple of --seq-len (64)"),
        (
            ["--scaling-tokens", "3000", "--micro-tokens", "2048"],
            "--scaling-tokens (3000) must be a multiple of --micro-tokens (2048)",
        ),
        (["--rounds", "0"], "--rounds (0) must be at least 1"),
        (["--scaling-experts", "2,8"], "top_k (4) must not exceed num_experts (2)"),
    ],
)
def test_wrong_numbers_are_named(arguments, message, capsys):
    from train_step import parse_arguments

    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err


# ---- equal work ------------------------------------------------------------------------------------------------------


def toy_config(**changes):
    from train_step import model_config, parse_arguments

    return model_config(parse_arguments(toy_arguments()), num_experts=4).replace(**changes)


def test_both_sides_compute_the_same_loss_from_the_same_weights(tmp_path):
    from _ours import OurSide
    from _peer import PeerSide

    from olmoe_lightning.checkpoint import load_pretrained

    # Without the balance loss, which transformers adds to the loss it returns and we to the gradients alone.
    options = {"config": toy_config(balance_loss_coeff=0.0).to_dict(), "seq_len": 32, "tokens": 64}
    ours = OurSide(**options, compile_blocks=False)
    peer = PeerSide(**options, compile_model=False, keep_memory=True)
    peer.model.save_pretrained(tmp_path)
    load_pretrained(ours.model, str(tmp_path))
    assert peer.model.config._attn_implementation == "sdpa"
    for name in ("eager", "grouped_mm"):
        peer.use(name)
        assert peer.model.config._experts_implementation == name
        for ours_batch, peer_batch in zip(ours.batches, peer.batches, strict=True):
            # fp32 means over 64 tokens near log(300) = 5.7; other labels or a missing shift differ in the second digit
            assert ours.loss(ours_batch, 1).item() == pytest.approx(peer.loss(peer_batch, 1).item(), abs=1e-4)
    assert ours.loss(ours.batches[0], 1).item() != pytest.approx(peer.loss(peer.batches[1], 1).item(), abs=1e-4)
    optimizers = [type(side.optimizer) for side in (ours, peer)]
    assert optimizers == [torch.optim.AdamW, torch.optim.AdamW]
    decayed = [
        sum(p.numel() for g in side.optimizer.param_groups if g["weight_decay"] for p in g["params"])
        for side in (ours, peer)
    ]
    assert decayed[0] == decayed[1]
    assert all(group["fused"] for side in (ours, peer) for group in side.optimizer.param_groups)


def test_accumulated_microbatches_give_the_gradients_of_one_batch():
    from _ours import OurSide

    # Without the balance loss, whose scope is the microbatch.
    side = OurSide(toy_config(balance_loss_coeff=0.0).to_dict(), seq_len=32, tokens=64, compile_blocks=False)
    whole = {name: torch.cat([batch[name] for batch in side.batches[:2]]) for name in side.batches[0]}
    side.loss(whole, 1).backward()
    expected = [parameter.grad.clone() for parameter in side.model.parameters()]
    side.optimizer.zero_grad()
    for batch in side.batches[:2]:
        side.loss(batch, 2).backward()
    for parameter, grad in zip(side.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)  # fp32 sums in another order


def test_trainer_and_bare_loop_end_with_the_same_weights():
    from _overhead import TrainerSide

    side = TrainerSide(toy_config().to_dict(), seq_len=32, tokens=64, compile_blocks=False)
    weights = {}
    for way in ("bare", "trainer", "trainer_bar"):
        gaps = side.measure(way, count=3, warmup=2)
        assert len(gaps) == 3
        assert min(gaps) > 0
        weights[way] = side.last_weights
    for name, expected in weights["bare"].items():
        for way in ("trainer", "trainer_bar"):
            # the same arithmetic in the same order on the same machine
            torch.testing.assert_close(weights[way][name], expected, rtol=1e-6, atol=1e-7)
    side.measure("bare", count=1, warmup=2)
    moved = [not torch.equal(side.last_weights[name], weights["bare"][name]) for name in weights["bare"]]
    assert any(moved)  # two more steps do show


def test_a_side_that_fails_says_why():
    from _workers import Worker, WorkerError

    with Worker("peak", 1, shapes=[[2, 3, 4]]) as right, Worker("peak", 1, size=1) as wrong:
        assert right.ask("measure", seconds=0.01)["shape"] == "2x3x4"
        with pytest.raises(WorkerError, match=r"peak: AttributeError: .*'fly'"):
            right.ask("fly")
        assert right.ask("measure", seconds=0.01)["flops"] > 0  # and it goes on
        with pytest.raises(WorkerError, match=r"(?s)ended with status 1 at 'measure'.*unexpected keyword"):
            wrong.ask("measure", seconds=0.01)


# ---- the command -----------------------------------------------------------------------------------------------------


def numbers(value) -> list[float]:
    """All numbers below a value of the line of JSON."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.slow
def test_the_command_prints_a_table_and_one_line_of_json():
    arguments = toy_arguments(
        *("--experts", "4", "--rounds", "2", "--steps", "1", "--peak-seconds", "0.05"),
        *("--scaling-experts", "4", "--scaling-tokens", "128", "--micro-tokens", "64"),
    )
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "train_step.py"), *arguments], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    *text, last = run.stdout.splitlines()
    results = json.loads(last)
    assert not any(line.startswith("{") for line in text)
    assert all(word in run.stdout for word in ("Against transformers", "More experts", "Trainer with progress bar"))

    (peer,) = results["peer"]
    assert peer["experts"] == 4
    assert set(peer["sides"]) == {"ours", "transformers"}
    assert {"grouped_mm", "eager"} <= set(peer["experts_implementation"]["seconds"])
    assert results["scaling"]["microbatches"] == 2
    assert results["overhead"]["rounds"] == 2
    for part in ("peer", "scaling", "overhead"):
        assert all(math.isfinite(number) for number in numbers(results[part]))
    for figure in (peer["sides"]["transformers"]["ours_over_it"], peer["sides"]["ours"]["of_peak"]):
        assert figure["median"] > 0
        assert len(figure["rounds"]) == 2
