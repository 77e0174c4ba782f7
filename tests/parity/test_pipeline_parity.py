"""Every schedule on every mesh computes what one process computes; stages are uneven, and so are the token counts.

The model has 8 layers, the first one dense, so that with 8 stages one has no router; bounds as in ``test_parity``.
"""

import dataclasses

import pytest
import torch

from olmoe_lightning.model.stage import Stage
from olmoe_lightning.parallel.pipeline.stages import PIPELINE_SCHEDULES
from olmoe_lightning.tools.parity import ParityCase, compare, format_table, record
from olmoe_lightning.tools.parity.record import LabModel

MESHES = [(2, 1, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]  # (pipeline, expert_replica, expert)
SPLITS = {2: [3, 5], 4: [1, 3, 2, 2], 8: [1] * 8}  # by the number of stages


def on(schedule, pipeline, expert_replica, expert, **options):
    """A case on this mesh, with as few microbatches as the schedule runs with."""
    stages = pipeline * PIPELINE_SCHEDULES[schedule].stages_per_rank
    return ParityCase(
        devices=pipeline * expert_replica * expert,
        pipeline_parallel=pipeline,
        expert_parallel=expert,
        schedule=schedule,
        num_microbatches=max(stages, 4),
        split=SPLITS[stages],
        **options,
    )


@pytest.fixture(scope="module")
def alone():
    """Records of one process, each made once."""
    known = {}

    def make(case):
        plain = {"expert_parallel": 1, "schedule": "1f1b", "split": None, "shard_optimizer": True, "recompute": "none"}
        key = dataclasses.replace(case, **plain)
        if key not in known:
            known[key] = record(case, alone=True)
        return known[key]

    return make


def deviating(rows):
    return {row.quantity for row in rows if not row.ok}


def check(case, alone, workers):
    rows = compare(alone(case), workers(case.devices).run(record, case)[0], case.bound)
    assert deviating(rows) == set(), "\n" + format_table(rows)


def usual(schedule, mesh, accumulate):
    """What runs each time: every schedule once, and each mesh with two of them."""
    by_default = (mesh == (2, 1, 1) and accumulate == 2) or (
        accumulate == 1 and schedule in ("1f1b", "zbv_zero_bubble") and mesh != (2, 1, 1)
    )
    return [] if by_default else [pytest.mark.parity]


MATRIX = [
    pytest.param(schedule, mesh, accumulate, marks=usual(schedule, mesh, accumulate))
    for schedule in PIPELINE_SCHEDULES
    for mesh in MESHES
    for accumulate in (1, 2)
]


@pytest.mark.parametrize(("schedule", "mesh", "accumulate"), MATRIX)
def test_every_schedule_on_every_mesh_equals_one_process(alone, workers, schedule, mesh, accumulate):
    check(on(schedule, *mesh, accumulate=accumulate, clip=0.5), alone, workers)


@pytest.mark.parity
@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_every_schedule_on_eight_processes_equals_one(alone, workers, schedule):
    check(on(schedule, 2, 2, 2, accumulate=2, clip=0.5), alone, workers)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_bf16_stages_with_fp32_masters_stay_near_one_process(alone, workers, schedule):
    check(on(schedule, 2, 1, 1, precision="bf16"), alone, workers)


@pytest.mark.parametrize("recompute", ["block", "experts"])
def test_recomputed_stages_equal_one_process(alone, workers, recompute):
    check(on("1f1b", 2, 1, 2, recompute=recompute), alone, workers)


def test_tied_embeddings_at_both_ends_of_a_v_equal_one_process(alone, workers):
    check(on("zbv_zero_bubble", 2, 1, 1, tie_embeddings=True), alone, workers)


class TwiceTheLoss(Stage):
    """The mistake: the last stage's gradient is scaled."""

    def forward(self, x, **batch):
        y = super().forward(x, **batch)
        if self.last and y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


class WithoutALayer(Stage):
    """The mistake: a stage leaves out its last layer."""

    def __init__(self, transformer, layers, first, last):
        super().__init__(transformer, layers, first, last)
        if last:
            del self.blocks._modules[str(layers[-1])]

    def take_stats(self):
        super().take_stats()  # one row too few


def broken(case, mistake):
    import olmoe_lightning.training.objective

    whole = olmoe_lightning.training.objective.Stage
    olmoe_lightning.training.objective.Stage = mistake
    try:
        return record(case)
    finally:
        olmoe_lightning.training.objective.Stage = whole


@pytest.mark.parametrize("mistake", [TwiceTheLoss, WithoutALayer])
def test_a_mistake_in_a_stage_is_seen(alone, workers, mistake):
    case = on("1f1b", 2, 1, 1)
    rows = compare(alone(case), workers(2).run(broken, case, mistake)[0], case.bound)
    assert any("gradients" in quantity for quantity in deviating(rows))


class Still(LabModel):
    """Does not move."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_every_topology_starts_from_the_same_weights(workers):
    case = on("interleaved_1f1b", 2, 1, 2, optimizer="sgd")
    here = record(case, alone=True, model=Still).parameters
    there = workers(4).run(record, case, model=Still)[0].parameters
    assert there.keys() == here.keys()
    assert len({name.split(".")[2] for name in there if ".blocks." in name}) == 8
    assert [name for name, value in here.items() if not torch.equal(value, there[name])] == []
