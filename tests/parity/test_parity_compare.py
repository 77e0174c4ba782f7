"""The table: what counts as a deviation, and what is said about it."""

import copy
import math

import pytest
import torch

from olmoe_lightning.model import Transformer
from olmoe_lightning.tools.parity import ParityCase, compare, format_table, record
from olmoe_lightning.tools.parity.compare import GROUPS, group_of


@pytest.fixture(scope="module")
def original():
    return record(ParityCase(devices=1), alone=True)


def only_deviation(original, changed, bound=2e-5):
    (row,) = [row for row in compare(original, changed, bound) if not row.ok]
    return row


def test_a_run_equals_itself(original):
    rows = compare(original, original, 0.0)
    assert {row.verdict for row in rows} == {"equal"}
    for group in GROUPS:
        assert {f"gradients: {group}", f"parameters: {group}"} <= {row.quantity for row in rows}


def test_a_deviation_is_relative_to_the_largest_value_of_the_group_in_that_step(original):
    changed = copy.deepcopy(original)
    gradients = changed.steps[1].gradients
    largest = max(value.abs().max() for name, value in gradients.items() if group_of(name) == "router").item()
    name = next(name for name in gradients if group_of(name) == "router")
    gradients[name].view(-1)[3] += 0.01 * largest
    row = only_deviation(original, changed)
    assert row.quantity == "gradients: router"
    assert row.verdict == "DEVIATES"
    assert row.relative == pytest.approx(0.01, rel=1e-3)
    assert row.absolute == pytest.approx(0.01 * largest, rel=1e-3)
    assert {row.verdict for row in compare(original, changed, 0.02) if row.absolute} == {"ok"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_deviates(original, value):
    changed = copy.deepcopy(original)
    next(iter(changed.parameters.values())).view(-1)[0] = value
    assert only_deviation(original, changed, bound=1e9).absolute == math.inf


def test_what_is_missing_deviates(original):
    changed = copy.deepcopy(original)
    name = next(name for name in changed.state["exp_avg"] if group_of(name) == "shared")
    del changed.state["exp_avg"][name]
    assert only_deviation(original, changed).quantity == "optimizer: exp_avg"


def test_a_step_too_few_deviates(original):
    changed = copy.deepcopy(original)
    changed.steps.pop()
    assert only_deviation(original, changed).quantity == "optimizer steps"


def test_a_gradient_where_there_should_be_none_deviates(original):
    without, small = copy.deepcopy(original), copy.deepcopy(original)
    for step in (without.steps[0], small.steps[0]):
        for name, value in step.gradients.items():
            if group_of(name) == "experts":
                value.fill_(0.0 if step is without.steps[0] else 1e-30)
    assert only_deviation(without, small).relative == math.inf


def test_replicas_that_differ_in_one_bit_deviate(original):
    changed = copy.deepcopy(original)
    changed.ranks = [changed.ranks[0], copy.deepcopy(changed.ranks[0])]
    weight = changed.ranks[1].weights["model.norm.weight"]
    weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))
    assert only_deviation(original, changed).quantity == "replicas: dense weights"


def test_every_parameter_has_its_group():
    groups = {}
    for name, parameter in Transformer(ParityCase().model_config).named_parameters():
        groups.setdefault(group_of(f"model.{name}"), set()).add(parameter.ndim)
    assert groups == {group: {3} if group == "experts" else {1} if group == "norms" else {2} for group in GROUPS}


def test_the_table_has_a_line_for_each_quantity(original):
    lines = format_table(compare(original, original, 2e-5)).splitlines()
    assert lines[0].split() == ["quantity", "absolute", "relative", "bound", "verdict"]
    assert len(lines) == 1 + len(compare(original, original, 2e-5))
    assert all(line.endswith("equal") for line in lines[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 3, "expert_parallel": 2}, r"devices \(3\) must be divisible by expert_parallel \(2\)"),
        ({"accumulate": 0}, r"accumulate \(0\)"),
        ({"clip": -1.0}, r"clip \(-1.0\)"),
        ({"routing": "idle_rank"}, r"expert_parallel \(1\)"),
        ({"partial_window": True}, r"accumulate \(1\)"),
        ({"routing": "hot_expert", "precision": "bf16"}, "fp32 only"),
    ],
)
def test_a_case_that_cannot_be_is_refused_with_its_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        ParityCase(**options)
