"""Timelines of schedules: the order that PyTorch really runs, known closed forms of the bubble, memory, text."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from olmoe_lightning.parallel.pipeline.stages import PIPELINE_SCHEDULES, find_pipeline_schedule, make_stage_map
from olmoe_lightning.tools import timeline as timeline_module
from olmoe_lightning.tools.timeline import Action, Durations, action_table, simulate, torch_action_table

SIZES = list(itertools.product((1, 2, 3, 4, 8), (8, 16)))
WITH_TABLES = [name for name, schedule in PIPELINE_SCHEDULES.items() if schedule.stages_per_rank > 1]


def flat(row):
    return [action for step in row for action in step]


class RecordedStage(PipelineStage):
    """Notes what the schedule asks of it, in the order of the calls."""

    log: list[Action]

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        self.log.append(Action(self.stage_index, "F", fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        self.log.append(Action(self.stage_index, "B" if full_backward else "I", bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        self.log.append(Action(self.stage_index, "W", bwd_chunk_id))
        return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def run_for_real(schedule, microbatches, stages_per_rank=None):
    """Train one step of linear layers; what this rank did."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = make_stage_map(schedule, ranks, stages_per_rank, 4 * ranks, microbatches)
    log: list[Action] = []
    example = torch.zeros(2, 3, device="meta")
    recorded = []
    for stage in stages.stages_of(rank):
        one = RecordedStage(
            torch.nn.Linear(3, 3),
            stage,
            stages.num_stages,
            torch.device("cpu"),
            input_args=example.clone().requires_grad_(stage > 0),
            output_args=example.clone().requires_grad_(),
        )
        one.log = log
        recorded.append(one)
    found = find_pipeline_schedule(schedule)
    made = found.build(recorded, microbatches, lambda output, target: (output - target).square().sum())
    x = torch.ones(2 * microbatches, 3)
    made.step(*((x,) if rank == 0 else ()), target=x if rank == stages.last_rank else None, return_outputs=False)
    return log


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_two_processes_run_what_the_table_has(schedule, workers):
    per_rank = PIPELINE_SCHEDULES[schedule].stages_per_rank
    table = action_table(schedule, 2, per_rank, 6)
    assert workers(2).run(run_for_real, schedule, 6) == [flat(row) for row in table]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_four_processes_run_what_our_own_rows_have(schedule, workers):
    table = action_table(schedule, 4, 1, 5)
    assert workers(4).run(run_for_real, schedule, 5) == [flat(row) for row in table]
    assert flat(table[0]) != flat(table[1])  # the comparison has something to find


@pytest.mark.parametrize("schedule", WITH_TABLES)
def test_pytorchs_tables_have_the_shape_that_we_read(schedule):
    """Fails when PyTorch moves what :func:`torch_action_table` looks at."""
    per_rank = PIPELINE_SCHEDULES[schedule].stages_per_rank
    table = torch_action_table(schedule, 4, per_rank, 8)
    stages = make_stage_map(schedule, 4, per_rank, 8, 8)
    for rank, row in enumerate(table):
        assert all(stages.rank_of(action.stage) == rank for action in flat(row))
        assert max(map(len, row)) == (2 if schedule == "dualpipev" else 1)
        assert type(flat(row)[0].stage) is type(flat(row)[0].microbatch) is int


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_every_microbatch_passes_every_stage_once_in_a_possible_order(schedule):
    record = PIPELINE_SCHEDULES[schedule]
    for (ranks, microbatches), per_rank in itertools.product(SIZES, (1, 2, 3)):
        if per_rank < record.stages_per_rank or (record.fixed_stages and per_rank > record.stages_per_rank):
            continue
        if not record.accepts(ranks, per_rank, microbatches):
            continue
        actions = [action for row in action_table(schedule, ranks, per_rank, microbatches) for action in flat(row)]
        assert len(set(actions)) == len(actions)
        assert any(action.kind == "W" for action in actions) == record.splits_backward
        done = {(a.stage, a.microbatch): set() for a in actions}
        for action in actions:
            done[action.stage, action.microbatch].add(action.kind)
        assert len(done) == ranks * per_rank * microbatches
        assert all(kinds in ({"F", "B"}, {"F", "I", "W"}) for kinds in done.values())

        ends = {}
        for timed in simulate(schedule, ranks, per_rank, microbatches).actions:
            ends[timed.action] = timed.end
            s, m = timed.action.stage, timed.action.microbatch
            if timed.action.kind == "F" and s > 0:
                assert ends[Action(s - 1, "F", m)] <= timed.start
            if timed.action.kind in "BI":
                assert ends[Action(s, "F", m)] <= timed.start
                if s < ranks * per_rank - 1:
                    assert min(ends.get(Action(s + 1, kind, m), 1e9) for kind in "BI") <= timed.start
            if timed.action.kind == "W":
                assert ends[Action(s, "I", m)] <= timed.start


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_bubble_of_one_stage_per_rank_has_its_closed_form(schedule, ranks, microbatches):
    timeline = simulate(schedule, ranks, 1, microbatches)
    assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert timeline.makespan == 3 * (microbatches + ranks - 1)
    assert timeline.idle == pytest.approx([timeline.bubble] * ranks)  # all wait equally long
    peaks = [microbatches] * ranks if schedule == "gpipe" else [ranks - rank for rank in range(ranks)]
    assert list(timeline.activation_peaks) == peaks


@pytest.mark.parametrize("per_rank", [2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(ranks, per_rank):
    microbatches = 4 * ranks
    bubble = simulate("interleaved_1f1b", ranks, per_rank, microbatches).bubble
    # (P - 1) / V units of a whole rank's work are lost, of M that are done.
    assert bubble == pytest.approx((ranks - 1) / (per_rank * microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_split_schedules_have_the_closed_forms_of_the_documentation(ranks):
    for microbatches in (2 * ranks, 4 * ranks):
        # Of 6 M units per rank (2 stages of 3), the P - 1 forwards until the first arrives are all that is lost.
        expected = (ranks - 1) / (6 * microbatches + ranks - 1)
        assert simulate("zbv_zero_bubble", ranks, 2, microbatches).bubble == pytest.approx(expected)
        assert simulate("interleaved_zero_bubble", ranks, 2, microbatches).bubble == pytest.approx(expected)
        dual = simulate("dualpipev", ranks, 2, microbatches)
        assert dual.bubble == pytest.approx((ranks - 1) / (3 * microbatches + ranks - 1))
        assert dual.microbatches_in_memory == (ranks + 0.5,) * ranks
    for microbatches, exact in ((-(-3 * ranks // 2), True), (3 * ranks // 2 - 1, False)):  # from 1.5 P on
        bubble = simulate("zbv_zero_bubble", ranks, 2, microbatches).bubble
        assert (bubble == pytest.approx((ranks - 1) / (6 * microbatches + ranks - 1))) == exact


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_splitting_the_backward_fills_most_of_the_bubble_at_the_memory_of_1f1b(ranks):
    plain, interleaved = simulate("1f1b", ranks, 1, 16), simulate("interleaved_1f1b", ranks, 2, 16)
    for schedule in ("zbv_zero_bubble", "interleaved_zero_bubble"):
        split = simulate(schedule, ranks, 2, 16)
        assert split.bubble < interleaved.bubble < plain.bubble
        assert max(split.microbatches_in_memory) <= max(plain.microbatches_in_memory)
    assert max(interleaved.microbatches_in_memory) > max(plain.microbatches_in_memory)


def test_one_rank_never_waits():
    for name, schedule in PIPELINE_SCHEDULES.items():
        assert simulate(name, 1, schedule.stages_per_rank, 4).bubble == 0.0


def test_the_bottleneck_stage_sets_the_pace():
    even = simulate("1f1b", 2, 1, 8)
    uneven = simulate("1f1b", 2, 1, 8, stage_costs=[1.0, 3.0])
    assert even.makespan == 27.0
    # The bottleneck takes 1.5 of a mean stage: one forward of the cheap one, 8 x 3 x 1.5, and its last backward.
    assert uneven.makespan == pytest.approx(0.5 + 36.0 + 1.0)
    assert uneven.idle[1] < even.bubble < uneven.idle[0]
    assert simulate("1f1b", 2, 1, 8, stage_costs=[7.0, 7.0]) == even


def test_transfers_delay_other_ranks_but_not_the_own_next_stage():
    assert simulate("gpipe", 2, 1, 1, Durations(transfer=0.5)).makespan == 6.0 + 2 * 0.5
    # Stages 0 to 3 of a V on ranks 0, 1, 1, 0: two of three borders are between ranks.
    assert simulate("zbv_zero_bubble", 2, 2, 1, Durations(transfer=0.5)).makespan == pytest.approx(
        simulate("zbv_zero_bubble", 2, 2, 1).makespan + 4 * 0.5
    )


def test_the_backward_of_the_first_stage_is_not_split():
    ends = {str(timed.action): timed.end - timed.start for timed in simulate("zbv_zero_bubble", 2, 2, 3).actions}
    assert (ends["0I0"], ends["0W0"]) == (0.0, 2.0)
    assert (ends["1I0"], ends["1W0"]) == (1.0, 1.0)


def test_a_pair_of_dualpipev_passes_its_results_on_when_both_are_done():
    pair = ((Action(0, "F", 0), Action(0, "B", 1)),)
    alone = ((Action(0, "F", 0),), (Action(0, "B", 1),))
    before = ((Action(0, "F", 1),),)
    after = ((Action(1, "F", 1),), (Action(1, "B", 1),), (Action(1, "F", 0),))
    starts = []
    for steps in (pair, alone):
        played = timeline_module._play((before + steps, after), Durations(), [1.0, 1.0])
        starts.append({str(timed.action): timed.start for timed in played}["1F0"])
    # The backward waits until 4 for the other rank, and runs until 6; the forward alone was done at 2.
    assert starts == [6.0, 4.0]


def test_a_table_that_waits_for_itself_is_reported_with_where_it_stands():
    crossed = (((Action(0, "B", 0),), (Action(0, "F", 0),)), ((Action(1, "F", 0),), (Action(1, "B", 0),)))
    with pytest.raises(ValueError, match="rank 0 at 0B0, rank 1 at 1F0"):
        timeline_module._play(crossed, Durations(), [1.0, 1.0])


def test_the_text_has_a_column_per_unit_and_a_dot_where_a_rank_waits():
    assert simulate("1f1b", 3, 1, 4).to_text("  ").splitlines() == [
        "  rank 0 012....aa3bb.cc.dd",
        "  rank 1 .01..aa2bb3cc.dd..",
        "  rank 2 ..0aa1bb2cc3dd....",
    ]
    lines = simulate("zbv_zero_bubble", 2, 2, 4).to_text().splitlines()
    assert [line[:14] for line in lines] == [f"rank {r} stage {s}" for r, s in ((0, 0), (0, 3), (1, 1), (1, 2))]
    dots = [[column for column, cell in enumerate(line) if cell == "."] for line in lines]
    assert dots[0] == dots[1]
    assert dots[2] == dots[3]


def test_short_actions_get_several_columns_so_that_none_is_lost():
    timeline = simulate("1f1b", 2, 1, 3, stage_costs=[1.0, 3.0])
    rows = timeline.to_text().splitlines()
    for row, microbatch in itertools.product(rows, "012abc"):
        assert microbatch in row.split(maxsplit=2)[2]


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ({"forward": 0.0}, r"forward \(0\) must be positive"),
        ({"transfer": -1.0}, r"transfer \(-1.0\)"),
        ({"backward_input": float("nan")}, r"backward_input \(nan\)"),
    ],
)
def test_impossible_durations_are_refused(durations, message):
    with pytest.raises(ValueError, match=message):
        Durations(**durations)


def test_stage_costs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must be 2 positive numbers"):
        simulate("1f1b", 2, 1, 4, stage_costs=[1.0])
    with pytest.raises(ValueError, match="must be 2 positive numbers"):
        simulate("1f1b", 2, 1, 4, stage_costs=[1.0, 0.0])
