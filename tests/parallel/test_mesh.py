"""The mesh: which rank is what, checked sizes, and groups that reduce over the right processes."""

import pytest
import torch
import torch.distributed as dist

from olmoe_lightning.parallel import Mesh, MeshShape


def test_expert_is_the_innermost_axis_and_every_rank_has_its_own_place():
    shape = MeshShape.of_world(12, pipeline=2, expert=3)
    assert shape == MeshShape(pipeline=2, expert_replica=2, expert=3)
    assert shape.data == 6
    assert shape.world == 12
    places = [shape.coordinates(rank) for rank in range(12)]
    assert places[:4] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)]
    assert places[6] == (1, 0, 0)
    assert len(set(places)) == 12


@pytest.mark.parametrize(
    ("world", "pipeline", "expert", "message"),
    [
        (6, 1, 4, r"number of processes \(6\).*expert_parallel_size \(4\) = 4"),
        (4, 3, 1, r"number of processes \(4\).*pipeline_parallel_size \(3\)"),
        (4, 1, 0, r"expert_parallel_size \(0\) must be at least 1"),
        (1, 1, 2, r"number of processes \(1\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_their_numbers(world, pipeline, expert, message):
    with pytest.raises(ValueError, match=message):
        MeshShape.of_world(world, pipeline, expert)


def test_one_process_needs_no_group():
    mesh = Mesh.single()
    assert mesh.world.size == mesh.data.size == mesh.expert.size == 1
    value = torch.ones(2)
    assert torch.equal(mesh.data.all_reduce(value), torch.ones(2))
    assert str(mesh) == "rank 0 of 1 (pipeline 0/1, expert_replica 0/1, expert 0/1)"


def sums_over_axes(pipeline, expert):
    mesh = Mesh.create(MeshShape.of_world(dist.get_world_size(), pipeline, expert))
    power = 10.0**mesh.rank  # digits of a sum tell who took part
    axes = (mesh.world, mesh.pipeline, mesh.data, mesh.expert_replica, mesh.expert)
    return {axis.name: (axis.ranks, axis.all_reduce(torch.tensor([power])).item()) for axis in axes}, str(mesh)


@pytest.mark.parametrize(("pipeline", "expert"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_each_axis_reduces_over_exactly_its_processes(workers, pipeline, expert):
    results = workers(4).run(sums_over_axes, pipeline, expert)
    shape = MeshShape.of_world(4, pipeline, expert)
    places = [shape.coordinates(rank) for rank in range(4)]
    for rank, (axes, text) in enumerate(results):
        assert text.startswith(f"rank {rank} of 4 (pipeline {places[rank][0]}/{shape.pipeline}")
        for axis, fixed in (("pipeline", (1, 2)), ("data", (0,)), ("expert_replica", (0, 2)), ("expert", (0, 1))):
            expected = tuple(r for r in range(4) if all(places[r][i] == places[rank][i] for i in fixed))
            assert axes[axis] == (expected, sum(10.0**r for r in expected))
        assert axes["world"] == ((0, 1, 2, 3), 1111.0)


def mismatched_shape():
    try:
        Mesh.create(MeshShape(1, 1, 3))
    except ValueError as error:
        return str(error)
    return "made"


def test_a_mesh_of_another_size_than_the_world_is_refused(workers):
    (message, _) = workers(2).run(mismatched_shape)
    assert "3 processes, but 2 are running" in message
