"""Learning-rate schedules: their values at the points that define them."""

import math

import pytest

from olmoe_lightning.training.lr_schedule import make_lr_schedule


def values(*arguments, steps):
    factor = make_lr_schedule(*arguments)
    return [factor(step) for step in range(steps)]


def test_warmup_is_linear_and_starts_above_zero():
    for kind in ("cosine", "wsd", "constant"):
        assert values(kind, 4, 100, 0.1, 0.2, steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_cosine_falls_from_one_to_the_ratio_and_stays_there():
    factor = make_lr_schedule("cosine", 10, 110, 0.1, 0.2)
    assert factor(10) == 1.0
    assert factor(60) == pytest.approx(0.55)  # half way
    assert factor(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert factor(110) == factor(500) == pytest.approx(0.1)


def test_wsd_stays_at_one_and_falls_linearly_over_its_last_part():
    factor = make_lr_schedule("wsd", 10, 100, 0.2, 0.25)
    assert {factor(step) for step in range(10, 76)} == {1.0}
    assert factor(87) == pytest.approx(1 - 0.8 * 12 / 25)
    assert factor(100) == factor(1000) == pytest.approx(0.2)


def test_wsd_decay_never_reaches_into_the_warmup():
    factor = make_lr_schedule("wsd", 50, 100, 0.0, 0.9)
    assert factor(49) == 1.0
    assert factor(75) == pytest.approx(0.5)


def test_constant_needs_no_length():
    assert values("constant", 0, None, 0.1, 0.2, steps=3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_a_run_of_warmup_alone_is_possible(kind):
    assert values(kind, 3, 3, 0.1, 0.2, steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear", 0, 10, 0.1, 0.2), r"schedule \('linear'\) must be one of 'cosine', 'wsd', 'constant'"),
        (("cosine", -1, 10, 0.1, 0.2), r"warmup_steps \(-1\)"),
        (("cosine", 0, 10, 1.5, 0.2), r"min_lr_ratio \(1.5\)"),
        (("wsd", 0, 10, 0.1, -0.2), r"decay_fraction \(-0.2\)"),
        (("cosine", 0, None, 0.1, 0.2), "set trainer.max_steps or schedule_steps"),
        (("cosine", 0, 0, 0.1, 0.2), r"length \(0 steps\)"),
        (("cosine", 20, 10, 0.1, 0.2), r"\(20 steps\) is longer than the schedule \(10 steps\)"),
    ],
)
def test_wrong_numbers_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_lr_schedule(*arguments)
