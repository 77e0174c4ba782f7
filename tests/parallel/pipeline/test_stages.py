"""The map of layers to stages to ranks: complete, optimal, placed and checked as PyTorch does it."""

import itertools
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.parallel.pipeline.stages import (
    PIPELINE_SCHEDULES,
    StageMap,
    find_pipeline_schedule,
    make_stage_map,
    split_layers,
    stage_costs,
)
from olmoe_lightning.tools.plan import relative_costs

MANY = 32  # microbatches that suit every schedule here; a multiple of all rounds


def schedules_with(stages_per_rank):
    for schedule in PIPELINE_SCHEDULES.values():
        if stages_per_rank == schedule.stages_per_rank or (
            stages_per_rank > schedule.stages_per_rank and not schedule.fixed_stages
        ):
            yield schedule.name


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_every_layer_is_in_exactly_one_stage_of_exactly_one_rank(stages_per_rank):
    checked = 0
    for ranks, layers in itertools.product(range(1, 9), range(1, 25)):
        if layers < ranks * stages_per_rank:
            continue
        for schedule in schedules_with(stages_per_rank):
            microbatches = max(1, MANY // ranks) * ranks
            stages = make_stage_map(schedule, ranks, stages_per_rank, layers, microbatches, last_cost=1.5)
            assert [layer for owned in stages.layers for layer in owned] == list(range(layers))
            assert sorted(layer for rank in range(ranks) for layer in stages.layers_of(rank)) == list(range(layers))
            assert all(len(stages.stages_of(rank)) == stages_per_rank for rank in range(ranks))
            assert all(stages.layers)
            checked += 1
    assert checked > 100


def compositions(total, parts):
    """All ways to write ``total`` as a sum of ``parts`` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        ends = [0, *cuts, total]
        yield [b - a for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    "costs",
    [None, (3, 1, 1, 1, 2, 5, 1, 1, 1), (1, 1, 0, 0, 0, 4, 4, 1, 1), (0.1, 0.2, 0.3, 0.1, 0.1, 0.7, 0.3, 0.2, 0)],
)
@pytest.mark.parametrize("ends", [(0, 0), (0.5, 1.4), (3, 0), (0, 6)])
def test_split_is_the_best_of_all_by_the_stated_rule(costs, ends):
    for layers, parts in itertools.product(range(1, 10), range(1, 7)):
        if parts > layers:
            continue
        own = None if costs is None else costs[:layers]

        def rank(sizes, own=own):
            starts = list(itertools.accumulate(sizes, initial=0))
            owned = [range(a, b) for a, b in itertools.pairwise(starts)]
            found = stage_costs(owned, own, *ends)
            # Rounded, as these sums are floats and the real ones are exact.
            return round(max(found), 9), round(sum(cost**2 for cost in found), 9), sizes

        found = [len(owned) for owned in split_layers(layers, parts, own, *ends)]
        assert found == min(compositions(layers, parts), key=rank)


def test_the_longer_stages_come_last_and_leave_capacity_for_embedding_and_head():
    assert [len(owned) for owned in split_layers(10, 4)] == [2, 2, 3, 3]
    assert [len(owned) for owned in split_layers(16, 4, last_cost=3.0)] == [4, 5, 5, 2]
    assert [len(owned) for owned in split_layers(8, 2, first_cost=2.0)] == [3, 5]


def test_costs_of_dense_layers_and_the_head_move_the_cuts():
    config = ModelConfig.preset("tiny", num_layers=8, num_dense_layers=4, dense_hidden=2048)
    dense, moe = config.flops_per_layer(512)[0], config.flops_per_layer(512)[-1]
    assert dense > 2 * moe  # or the example shows nothing
    costs = relative_costs(config, 512)
    assert max(costs["layer_costs"]) == 1.0
    assert costs["last_cost"] == pytest.approx(config.flops_of_head / dense)
    sizes = [len(owned) for owned in make_stage_map("1f1b", 2, None, 8, 8, **costs).layers]
    assert sizes[0] < sizes[1]
    assert sum(config.flops_per_layer(512)) + config.flops_of_head == config.flops_per_token(512)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_stages_are_where_pytorch_puts_them(schedule):
    record = PIPELINE_SCHEDULES[schedule]
    for ranks in (1, 2, 3, 4, 8):
        stages = make_stage_map(schedule, ranks, None, 16, ranks * 4)
        placed = generate_stage_to_rank_mapping(ranks, stages.num_stages, record.placement)
        assert {stage: stages.rank_of(stage) for stage in range(stages.num_stages)} == placed
        assert stages.first_rank == 0
        assert stages.last_rank == (0 if record.placement == "v" else ranks - 1)


def test_a_v_gives_the_first_rank_both_ends():
    stages = make_stage_map("zbv_zero_bubble", 3, None, 12, 6)
    assert [stages.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert stages.layers_of(0) == (0, 1, 10, 11)
    assert str(stages).splitlines()[1] == "rank 0 | stage 0: embedding, layers 0-1 | stage 5: layers 10-11, head"


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_microbatches_and_stages_are_refused_exactly_where_the_real_class_refuses_them(schedule):
    record = PIPELINE_SCHEDULES[schedule]
    for ranks, per_rank, microbatches in itertools.product((1, 2, 3, 4), (2, 3), range(1, 14)):
        if record.fixed_stages and record.stages_per_rank == 1:
            per_rank = 1
        stages = [
            SimpleNamespace(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, submod=None)
            for _ in range(per_rank)
        ]
        try:
            record.torch_class()(stages[0] if per_rank == 1 else stages, microbatches)
            theirs = True
        except ValueError:
            theirs = False
        try:
            record.check(ranks, per_rank, microbatches)
            ours = True
        except ValueError:
            ours = False
        assert ours == theirs, (ranks, per_rank, microbatches)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1f1b", 4, None, 3, 8), {}, r"num_layers \(3\).*pipeline_parallel_size \(4\) x stages_per_rank \(1\) = 4"),
        (("1f1b", 4, 2, 8, 8), {}, r"'1f1b' has exactly 1 stage per rank, not stages_per_rank \(2\)"),
        (("dualpipev", 4, 3, 12, 12), {}, r"exactly 2 stages per rank, not stages_per_rank \(3\)"),
        (("interleaved_1f1b", 4, 1, 8, 8), {}, r"at least 2 stages per rank, not stages_per_rank \(1\)"),
        (("1f1b", 4, None, 8, 3), {}, r"num_microbatches \(3\).*at least.*\(4\) x stages_per_rank \(1\) = 4"),
        (("dualpipev", 2, None, 8, 3), {}, r"num_microbatches \(3\).* = 4"),
        (("interleaved_zero_bubble", 4, 2, 8, 9), {}, r"num_microbatches \(9\).*\(4\) = 2; 8 and 10 are the nearest"),
        (("1f2b", 4, None, 8, 8), {}, r"unknown schedule '1f2b' \(did you mean '1f1b'\?\)"),
        (("zbv", 4, None, 8, 8), {}, r"did you mean 'zbv_zero_bubble'\?.*gpipe"),
        (("", 4, None, 8, 8), {}, r"unknown schedule ''; the schedules"),
        (("gpipe", 0, None, 8, 8), {}, r"pipeline_parallel_size \(0\) must be at least 1"),
        (("gpipe", 2, 0, 8, 8), {}, r"stages_per_rank \(0\) must be at least 1"),
        (("gpipe", 2, None, 8, 0), {}, r"num_microbatches \(0\) must be at least 1"),
        (("gpipe", 2, None, 8, 4), {"split": [5, 2]}, r"split \[5, 2\].*sum 8; it has 2 with sum 7"),
        (("gpipe", 2, None, 8, 4), {"split": [4, 2, 2]}, r"must have 2 numbers.*it has 3"),
        (("gpipe", 2, None, 8, 4), {"split": [8, 0]}, r"each at least 1"),
        (("gpipe", 2, None, 8, 4), {"split": []}, r"it has 0"),
        (("gpipe", 2, None, 8, 4), {"layer_costs": [1.0] * 7}, "7 layer costs for 8 layers"),
        (("gpipe", 2, None, 2, 4), {"layer_costs": [1.0, -1.0]}, r"layer_costs\[1\] \(-1.0\)"),
        (("gpipe", 2, None, 2, 4), {"last_cost": float("inf")}, r"last_cost \(inf\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make_stage_map(*arguments, **options)


def test_an_explicit_split_is_taken_as_it_is():
    stages = make_stage_map("1f1b", 3, None, 9, 6, last_cost=100.0, split=[1, 2, 6])
    assert stages.layers == (range(0, 1), range(1, 3), range(3, 9))


@pytest.mark.parametrize(
    "layers",
    [
        (range(0, 2),),
        (range(0, 2), range(3, 4)),
        (range(0, 2), range(2, 2)),
        (range(1, 2), range(2, 3)),
    ],
)
def test_a_map_with_a_hole_or_an_empty_stage_cannot_be_made(layers):
    with pytest.raises(ValueError, match=r"stage"):
        StageMap("1f1b", 2, 1, layers)


def test_a_rank_or_stage_that_is_not_there_is_refused():
    stages = make_stage_map("1f1b", 2, None, 4, 4)
    with pytest.raises(ValueError, match="no stage 2; there are 2"):
        stages.rank_of(2)
    with pytest.raises(ValueError, match="no pipeline rank -1"):
        stages.stages_of(-1)


def test_names_find_their_classes():
    assert find_pipeline_schedule("1f1b").torch_class().__name__ == "Schedule1F1B"
    assert all(schedule.torch_class().__name__ == schedule.torch_name for schedule in PIPELINE_SCHEDULES.values())
