"""Buckets: parameters become views, gradients collect in fp32, pieces cover every element once."""

import pytest
import torch
from torch import nn

from olmoe_lightning.parallel.buffers import Bucket, NamedParameter, Unbucketed, make_buckets
from olmoe_lightning.parallel.grad_norm import clip_coefficient, sum_of_squares
from olmoe_lightning.parallel.mesh import Axis, Mesh
from olmoe_lightning.parallel.ownership import Ownership
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer


def named(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    return [NamedParameter(f"p{i}", parameter, i) for i, parameter in enumerate(parameters)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_pieces_of_all_ranks_hold_each_element_of_each_parameter_once(dtype, size):
    shapes = [(7, 5), (3,), (64, 33), (1,), (2, 3, 4)]
    originals = [parameter.detach().float().clone() for _, parameter, _ in named(*shapes, dtype=dtype)]
    covered = [torch.zeros(original.numel(), dtype=torch.int64) for original in originals]
    for rank in range(size):
        parameters = named(*shapes, dtype=dtype)
        bucket = Bucket(parameters, Axis("data", tuple(range(size)), rank), sharded=True)
        assert bucket.weights.numel() % size == 0
        for (_, parameter, _), original in zip(parameters, originals, strict=True):
            assert torch.equal(parameter.detach().float(), original)
            assert parameter.untyped_storage().data_ptr() == bucket.weights.untyped_storage().data_ptr()
        for number, start, stop, master in bucket.shards:
            assert master.dtype == torch.float32
            assert torch.equal(master.detach().reshape(-1), originals[number].reshape(-1)[start:stop])
            covered[number][start:stop] += 1
    assert all(bool((times == 1).all()) for times in covered)


def test_masters_of_fp32_weights_are_the_weights_and_of_bf16_weights_more_exact():
    parameters = named((4, 4))
    bucket = Bucket(parameters, Axis("data", (0, 1), 0), sharded=True)
    bucket.shards[0].master.data.fill_(3.0)
    assert (parameters[0].parameter.detach().reshape(-1)[: bucket.shards[0].stop] == 3.0).all()

    narrow = named((4, 4), dtype=torch.bfloat16)
    exact = torch.full((4, 4), 1.001)  # between two bf16 numbers
    bucket = Bucket(narrow, Axis("data", (0,), 0), sharded=True, values={narrow[0].parameter: exact})
    assert torch.equal(bucket.shards[0].master.detach(), exact)
    assert (narrow[0].parameter.float() == 1.0).all()
    bucket.masters.add_(0.01)
    bucket.start_gather()
    assert torch.equal(narrow[0].parameter, (exact + 0.01).bfloat16())


def test_gradients_of_bf16_weights_are_summed_in_fp32():
    module = nn.ParameterDict({"p": torch.zeros(1, dtype=torch.bfloat16)})
    (parameter,) = module.parameters()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    sharded = ShardedOptimizer(optimizer, Ownership(module, Mesh.single(), experts=()))
    total = 0.0
    for step in range(300):  # the sum of 300 ones stops at 256 in bf16
        sharded.begin_backward(sync=step == 299)
        sharded.add_loss(torch.zeros(()), torch.ones(()))
        parameter.sum().backward()
        total += 1
        assert parameter.grad is None
    sharded.finish_backward()
    sharded.assign_grads()
    (piece,) = sharded.shards.values()
    assert piece.master.grad is not None
    torch.testing.assert_close(piece.master.grad, torch.ones(1), rtol=1e-6, atol=0.0)


def test_what_nobody_else_holds_stays_where_it_is_unless_it_is_narrow():
    alone, narrow = named((3,)), named((3,), dtype=torch.bfloat16)
    single = Mesh.single().data
    axis_of = {each.parameter: single for each in (*alone, *narrow)}
    place = alone[0].parameter.data_ptr()
    groups = make_buckets([*alone, narrow[0]._replace(number=1)], axis_of, sharded=True)
    assert [type(group) for group in groups] == [Bucket, Unbucketed]
    assert alone[0].parameter.data_ptr() == place


def test_buckets_are_filled_from_the_last_parameter_on_and_end_at_the_limit():
    parameters = named((10,), (10,), (10,), (100,), (10,))
    pair = Axis("data", (0, 1), 0)
    groups = make_buckets(parameters, {p: pair for _, p, _ in parameters}, sharded=True, limit=25)
    assert [[each.number for each in group.parameters] for group in groups] == [[4], [3], [2, 1], [0]]


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_an_error():
    (each,) = named((3,))
    bucket = Bucket([each], Axis("data", (0,), 0), sharded=True)
    bucket.begin_backward()
    each.parameter.grad = torch.ones(3)
    bucket.collect(0)
    bucket.launch()
    each.parameter.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="the gradient of p0 arrived twice"):
        bucket.collect(0)


@pytest.mark.parametrize("length", [0, 1, 2047, 2048, 2049, 10_000])
def test_sum_of_squares_is_that_of_fp64(length):
    x = torch.randn(length, generator=torch.Generator().manual_seed(length))
    torch.testing.assert_close(sum_of_squares(x), x.double().square().sum(), rtol=1e-6, atol=0.0)


def test_sum_of_squares_of_many_elements_does_not_drift():
    x = torch.full((20_000_000,), 0.1)
    assert abs(sum_of_squares(x).item() / (x[0].double().item() ** 2 * len(x)) - 1) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_through(bad):
    x = torch.zeros(5000)
    x[4321] = bad
    assert not torch.isfinite(sum_of_squares(x))


def test_the_clip_coefficient_is_that_of_torch():
    for norm in (0.1, 1.0, 7.0):
        p = nn.Parameter(torch.zeros(1))
        p.grad = torch.tensor([norm])
        torch.nn.utils.clip_grad_norm_([p], 1.0)
        assert float(p.grad) == pytest.approx(clip_coefficient(norm, 1.0) * norm)
