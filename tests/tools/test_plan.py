"""``olmoe-lightning plan``: what it prints, the pictures, and one sentence for what does not fit."""

import json
from pathlib import Path

import pytest

from olmoe_lightning.cli import main
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.tools.plan import draw_timeline
from olmoe_lightning.tools.timeline import simulate

ROOT = Path(__file__).parents[2]
ONE_F_ONE_B = ["plan", "--schedule", "1f1b", "--pipeline-parallel", "4", "--num-microbatches", "8"]


def test_the_plan_shows_layers_timeline_idle_time_and_memory(capsys):
    assert main([*ONE_F_ONE_B, "--num-layers", "16"]) == 0
    out = capsys.readouterr().out
    assert "rank 3 | stage 3: layers 12-15, head" in out
    assert "rank 0 0123......aa4bb5cc6dd7ee.ff.gg.hh" in out
    assert "all     27.3%  at most 4" in out
    assert "33 forward passes of a mean stage long; 24 if no rank ever waited" in out
    assert "cost of the stages" not in out  # they are equal


def test_a_preset_brings_its_layers_and_their_costs(capsys):
    assert main([*ONE_F_ONE_B, "--config", "olmoe-1b-7b"]) == 0
    out = capsys.readouterr().out
    # The head is worth 1.36 layers, so the last stage has fewer of them.
    assert "rank 3 | stage 3: layers 13-15, head" in out
    assert "cost of the stages, in layers: 4, 4, 5, 4.36" in out


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "dualpipev"])
def test_the_legend_names_what_the_timeline_has(schedule, capsys):
    options = ["--schedule", schedule, "--pipeline-parallel", "2", "--num-microbatches", "12", "--transfer", "0.5"]
    assert main(["plan", *options]) == 0
    out = capsys.readouterr().out
    assert ("A-J gradients of weights" in out) == (schedule in ("interleaved_zero_bubble", "dualpipev"))
    assert ("a-j backward" in out) == (schedule != "interleaved_zero_bubble")
    assert "from microbatch 10 on again from 0" in out


def test_an_explicit_split_is_drawn_at_its_costs(capsys):
    options = ["--schedule", "gpipe", "--pipeline-parallel", "2", "--num-microbatches", "3", "--split", "[1,3]"]
    assert main(["plan", *options]) == 0
    assert "cost of the stages, in layers: 1, 3" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "begin"), [("plan.png", b"\x89PNG"), ("plan.SVG", b"<?xml")])
def test_the_picture_is_written(name, begin, tmp_path, capsys):
    assert main([*ONE_F_ONE_B, "--output", str(tmp_path / name)]) == 0
    assert f"written: {tmp_path / name}" in capsys.readouterr().out
    assert (tmp_path / name).read_bytes().startswith(begin)


@pytest.mark.parametrize(("schedule", "per_rank"), [("1f1b", 1), ("zbv_zero_bubble", 2)])
def test_the_picture_has_every_microbatch_and_the_figures(schedule, per_rank, tmp_path):
    draw_timeline(simulate(schedule, 4, per_rank, 8), tmp_path / "one.svg")
    text = (tmp_path / "one.svg").read_text()
    # One number for each forward and each (input) backward but that of a stage 0 that does nothing there.
    labels = [line for line in text.splitlines() if "<text" in line and line.endswith(">7</text>")]
    assert len(labels) == 2 * 4 * per_rank - (per_rank == 2)
    assert schedule in text
    assert "rank 3" in text
    draw_timeline(simulate(schedule, 4, per_rank, 8), tmp_path / "two.svg")
    assert (tmp_path / "two.svg").read_text() == text


@pytest.mark.parametrize("name", ["1f1b", "zbv_zero_bubble"])
def test_the_pictures_and_timelines_of_the_documentation_are_what_the_command_makes(name):
    timeline = simulate(name, 4, 1 if name == "1f1b" else 2, 8)
    page = (ROOT / "docs" / "pipeline.md").read_text()
    assert timeline.to_text() in page
    picture = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
    assert f"{name}: 4 ranks, 8 microbatches, {timeline.bubble:.1%} idle" in picture


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-microbatches", "2"], "num_microbatches (2) to be at least the number of stages"),
        (["--stages-per-rank", "2"], "has exactly 1 stage per rank, not stages_per_rank (2)"),
        (["--schedule", "1f2b"], "unknown schedule '1f2b' (did you mean '1f1b'?)"),
        (["--num-layers", "3"], "num_layers (3) must be at least the number of stages"),
        (["--num-layers", "16", "--config", "tiny"], "give num_layers (16) or config ('tiny'), not both"),
        (["--config", "tinny"], "unknown preset 'tinny'"),
        (["--config", "tiny", "--pipeline-parallel", "8"], "num_layers (4)"),
        (["--seq-len", "128"], "seq_len (128) must be at least 1 and needs a config"),
        (["--split", "[4,4,4]"], "split [4, 4, 4] must have 4 numbers of layers"),
        (["--split", "[1,0,1,1]"], "split [1, 0, 1, 1]"),
        (["--backward-weight", "-1"], "backward_weight (-1.0)"),
        (["--output", "plan.pdf"], "output 'plan.pdf' must end with .png or .svg"),
        (["--output", "gone/plan.svg"], "gone/plan.svg"),
        (["--num-microbatches", "many"], "num_microbatches"),
    ],
)
def test_what_does_not_fit_is_one_sentence(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*ONE_F_ONE_B, *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_flops_of_layers_and_head_are_those_of_a_token():
    config = ModelConfig.preset("tiny-64e")
    layers = config.flops_per_layer(1024)
    assert len(layers) == config.num_layers
    assert len(set(layers)) == 2  # dense and MoE
    assert sum(layers) + config.flops_of_head == config.flops_per_token(1024)


def test_the_benchmark_prints_every_schedule_and_one_line_of_json(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pipeline

    monkeypatch.setattr(pipeline, "RANKS", (2, 8))
    monkeypatch.setattr(pipeline, "MICROBATCHES", (8,))
    assert pipeline.main(["--part", "plan"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("dualpipev") and "needs 16" in line for line in table)
    result = json.loads(last)
    assert result["benchmark"] == "pipeline"
    (first, *_) = (e for e in result["plan"]["by_schedule"] if e["schedule"] == "1f1b")
    assert first["idle"] == pytest.approx(1 / 9, abs=1e-6)
    assert first["activation_copies"] == [2, 1]
