"""With rows in the memory of peers every topology computes what one process computes; bounds as in ``test_parity``.

The pipelines are those whose leases are hardest: several microbatches in flight, a backward pass that is split so that
the experts' weights read the rows last, and blocks that are computed again.
"""

import dataclasses

import pytest
import torch

from olmoe_lightning.parallel.pipeline.stages import PIPELINE_SCHEDULES
from olmoe_lightning.plugins import RowwiseComm
from olmoe_lightning.tools.parity import ParityCase, compare, format_table, record
from olmoe_lightning.tools.parity.record import LabModel

SPLITS = {2: [3, 5], 4: [1, 3, 2, 2]}  # by the number of stages
MESHES = [(1, 2), (2, 2), (1, 4)]  # (expert_replica, expert)


@pytest.fixture(scope="module")
def alone():
    """Records of one process, each made once."""
    known = {}

    def make(case):
        plain = {"schedule": "1f1b", "split": None, "shard_optimizer": True, "recompute": "none", "comm": "auto"}
        if case.routing != "idle_rank":
            plain["expert_parallel"] = 1
        key = dataclasses.replace(case, **plain)
        if key not in known:
            known[key] = record(case, alone=True)
        return known[key]

    return make


def on(expert_replica, expert, **options):
    return ParityCase(devices=expert_replica * expert, expert_parallel=expert, comm="rowwise", **options)


def in_a_pipeline(schedule, expert_replica=1, **options):
    stages = 2 * PIPELINE_SCHEDULES[schedule].stages_per_rank
    return ParityCase(
        devices=4 * expert_replica,
        pipeline_parallel=2,
        expert_parallel=2,
        schedule=schedule,
        num_microbatches=max(stages, 4),
        split=SPLITS[stages],
        comm="rowwise",
        **options,
    )


def check(case, alone, workers):
    rows = compare(alone(case), workers(case.devices).run(record, case)[0], case.bound)
    wrong = [row for row in rows if not row.ok]
    assert not wrong, "\n" + format_table(rows)


def by_default(values, *usual):
    """Only some run each time."""
    return [value if value in usual else pytest.param(value, marks=pytest.mark.parity) for value in values]


@pytest.mark.parametrize("mesh", by_default(MESHES, (2, 2)))
@pytest.mark.parametrize("precision", by_default(["fp32", "bf16"], "fp32"))
def test_every_mesh_equals_one_process(mesh, precision, alone, workers):
    check(on(*mesh, precision=precision, accumulate=2, clip=0.5), alone, workers)


@pytest.mark.parametrize("mesh", by_default(MESHES, (1, 2)))
@pytest.mark.parametrize("routing", ["empty_experts", "hot_expert", "idle_rank"])
def test_every_routing_equals_one_process(mesh, routing, alone, workers):
    check(on(*mesh, routing=routing), alone, workers)


@pytest.mark.parametrize("mesh", by_default([(1, 2), (2, 2)], (1, 2)))
@pytest.mark.parametrize("recompute", ["block", "experts"])
def test_recompute_equals_one_process(mesh, recompute, alone, workers):
    check(on(*mesh, recompute=recompute, accumulate=2), alone, workers)


@pytest.mark.parametrize("schedule", by_default(PIPELINE_SCHEDULES, "1f1b", "zbv_zero_bubble"))
def test_every_schedule_equals_one_process(schedule, alone, workers):
    check(in_a_pipeline(schedule), alone, workers)


@pytest.mark.parity
@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
@pytest.mark.parametrize("recompute", ["block", "experts"])
def test_every_schedule_with_recompute_equals_one_process(schedule, recompute, alone, workers):
    check(in_a_pipeline(schedule, recompute=recompute, accumulate=2), alone, workers)


# Two processes share the experts everywhere, and the same microbatches meet in a dispatch.
CROWDED = RowwiseComm(capacity_factor=0.8)
PLACES = {
    "replicas": {"devices": 4, "accumulate": 2},
    "recompute": {"devices": 2, "accumulate": 4, "recompute": "block"},
    "pipeline": {"devices": 4, "pipeline_parallel": 2, "num_microbatches": 4},
}


def crowded(**options):
    # Weights that stay equal keep the routing equal, to the last route.
    return ParityCase(expert_parallel=2, comm=CROWDED, steps=1, uneven=False, **options)


class PipelineModel(LabModel):
    """The model that a pipeline has, of more layers, wherever it is."""

    def __init__(self, case):
        super().__init__(dataclasses.replace(case, **PLACES["pipeline"]))


@pytest.mark.parametrize("place", by_default(PLACES, "replicas", "pipeline"))
def test_what_is_dropped_is_the_same_on_all_topologies(place, workers):
    case = crowded(**PLACES[place])
    alone = {"devices": 2, "pipeline_parallel": 1, "num_microbatches": 1, "accumulate": 4, "recompute": "none"}
    plain = dataclasses.replace(case, **alone)
    model = LabModel if case.pipeline_parallel == 1 else PipelineModel
    found = workers(case.devices).run(record, case)[0]
    wanted = workers(plain.devices).run(record, plain, False, None, model)[0]
    assert wanted.drops["dropped_by_expert"].sum() > 10
    for name, value in wanted.drops.items():
        if name == "weight_removed_by_expert":
            torch.testing.assert_close(found.drops[name], value, rtol=1e-5, atol=1e-5)  # sums in another order
        else:
            assert torch.equal(found.drops[name], value), name
    rows = compare(wanted, found, case.bound)
    assert all(row.ok for row in rows), "\n" + format_table(rows)
