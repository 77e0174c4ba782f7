"""Collectives that are started and waited for apart: values, order of sums, several under way, empty parts."""

import pytest
import torch
import torch.distributed as dist

from olmoe_lightning.parallel import Mesh, MeshShape
from olmoe_lightning.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter


def axis():
    return Mesh.create(MeshShape.of_world(dist.get_world_size())).data


def values(rank, length):
    """Different on every rank, with rounding that shows the order of a sum."""
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank * 2)


def scattered_and_gathered(length):
    data = axis()
    flat = values(data.rank, length)
    pending = reduce_scatter(data, flat)
    pending.wait()
    pending.wait()  # a second wait does nothing
    own = flat.chunk(data.size)[data.rank].clone()
    fresh = torch.full((length,), float("nan"))
    fresh.chunk(data.size)[data.rank].copy_(own)
    all_gather(data, fresh).wait()
    total = values(data.rank, length)
    all_reduce(data, total).wait()
    return own, fresh, total


@pytest.mark.parametrize("size", [2, 4])
def test_scattered_sums_are_added_in_the_order_of_the_ranks(workers, size):
    length = 8 * size
    results = workers(size).run(scattered_and_gathered, length)
    expected = values(0, length)
    for rank in range(1, size):
        expected = expected + values(rank, length)
    for rank, (own, gathered, total) in enumerate(results):
        assert torch.equal(own, expected.chunk(size)[rank])  # bit-equal: the order is fixed
        assert torch.equal(gathered, expected)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)


def exchanged(counts):
    """``counts[i][j]`` rows go from i to j; each row says where it comes from and where it belongs."""
    data = axis()
    me = data.rank
    rows = torch.cat([torch.full((n, 3), 10.0 * me + j) for j, n in enumerate(counts[me])])
    received = [row[me] for row in counts]
    output = torch.full((sum(received), 3), float("nan"))
    all_to_all(data, output, rows, received, counts[me]).wait()
    return output


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 3, 4], [0, 1, 0, 1], [2, 2, 2, 2], [5, 0, 0, 0]],
        [[0, 0, 0, 7], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]],
        [[0] * 4] * 4,
    ],
)
def test_rows_arrive_in_the_order_of_their_ranks_empty_blocks_too(workers, counts):
    for me, output in enumerate(workers(4).run(exchanged, counts)):
        expected = [10.0 * source + me for source in range(4) for _ in range(counts[source][me])]
        assert output[:, 0].tolist() == expected
        assert torch.equal(output, output[:, :1].expand(-1, 3))


def several_under_way():
    """Exchanges of different sizes are started together and waited for backwards."""
    data = axis()
    flats = [values(data.rank, 2 * (8 + 4 * i)) for i in range(5)]
    pending = [reduce_scatter(data, flat) for flat in flats]
    for each in reversed(pending):
        each.wait()
    return [flat.chunk(data.size)[data.rank] for flat in flats]


def test_several_reductions_may_be_under_way(workers):
    for rank, owns in enumerate(workers(2).run(several_under_way)):
        for i, own in enumerate(owns):
            length = 2 * (8 + 4 * i)
            assert torch.equal(own, (values(0, length) + values(1, length)).chunk(2)[rank])


def test_one_process_gives_everything_to_itself():
    alone = Mesh.single().data
    flat = torch.arange(4.0)
    for operation in (all_reduce, reduce_scatter, all_gather):
        operation(alone, flat).wait()
    assert torch.equal(flat, torch.arange(4.0))
    output = torch.empty(2, 2)
    all_to_all(alone, output, torch.eye(2), [2], [2]).wait()
    assert torch.equal(output, torch.eye(2))
