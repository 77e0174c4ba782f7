"""What the all-to-all plugin promises beyond the conformance suite: equal collectives, whole sums, clear errors."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from olmoe_lightning.parallel import Axis
from olmoe_lightning.parallel import collectives as real
from olmoe_lightning.plugins.comm import AllToAllComm, CommSpec, LocalComm
from olmoe_lightning.plugins.comm import all_to_all as module
from olmoe_lightning.tools.processes import WorkerError

CPU = torch.device("cpu")


def expert_axis():
    return Axis("expert", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def spec(num_experts, top_k=2, d_model=8, dtype=torch.float32):
    return CommSpec(num_experts, top_k, d_model, dtype, CPU)


def routing(kind, tokens, experts, top_k):
    """Expert ids [tokens, top_k] of this process."""
    if kind == "all to the first":
        return torch.arange(top_k).repeat(tokens, 1)
    return torch.rand(tokens, experts).topk(top_k).indices


def collectives_of_a_step(kind, train):
    """Names and dtypes of the collectives this process issues, with as many tokens as its rank."""
    axis = expert_axis()
    comm = AllToAllComm()
    comm.setup(axis, spec(2 * axis.size))
    seen = []

    def recorded(axis, output, input, *splits):
        seen.append((str(output.dtype), output.dim()))
        return real.all_to_all(axis, output, input, *splits)

    x = torch.randn(axis.rank, 8, requires_grad=train)
    weights = torch.rand(axis.rank, 2, requires_grad=train)
    with mock.patch.object(module, "all_to_all", recorded), torch.set_grad_enabled(train):
        sent = comm.dispatch(x, routing(kind, axis.rank, 2 * axis.size, 2), weights)
        y = comm.combine(sent.rows_RD * sent.row_weights_R[:, None], sent.handle)
        if train:
            y.sum().backward()
    return seen, len(sent.rows_RD)


@pytest.mark.parametrize("size", [2, 4])
def test_every_process_issues_the_same_collectives_whatever_it_sends_or_receives(workers, size):
    steps = {kind: workers(size).run(collectives_of_a_step, kind, True) for kind in ("all to the first", "random")}
    received = [rows for _, rows in steps["all to the first"]]
    assert received == [size * (size - 1)] + [0] * (size - 1)  # one process gets all, others nothing
    counts, rows, weights = ("torch.int32", 1), ("torch.float32", 2), ("torch.float32", 1)
    forward = [counts, rows, weights, rows]
    for step in steps.values():
        assert [seen for seen, _ in step] == [[*forward, rows, rows, weights]] * size
    assert [seen for seen, _ in workers(size).run(collectives_of_a_step, "random", False)] == [forward] * size


def identity_experts(dtype, top_k, experts_local):
    """(outputs, what they should be, gradient of weights, what it should be, tokens, its gradient, weights)."""
    axis = expert_axis()
    torch.manual_seed(axis.rank)
    experts, tokens = experts_local * axis.size, 5 + 3 * axis.rank
    comm = AllToAllComm()
    comm.setup(axis, spec(experts, top_k, dtype=dtype))
    x = torch.randint(-8, 8, (tokens, 8)).to(dtype).requires_grad_()
    weights = (torch.randint(1, 5, (tokens, top_k)) / 4).requires_grad_()
    sent = comm.dispatch(x, routing("random", tokens, experts, top_k), weights)
    assert sent.rows_RD.dtype == dtype
    assert sent.row_weights_R.dtype == torch.float32
    y = comm.combine(sent.rows_RD * sent.row_weights_R[:, None].to(dtype), sent.handle)
    y.sum().backward()
    return [t.detach().float() for t in (y, weights.sum(1, keepdim=True) * x, x.grad, weights.grad, x, weights)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "top_k", "experts_local"), [(2, 1, 1), (2, 3, 4), (4, 2, 2)])
def test_experts_that_do_nothing_give_each_token_times_the_sum_of_its_weights(
    workers, size, top_k, experts_local, dtype
):
    # The values are small multiples of 1/4, so that every product and sum is exact in bfloat16 too.
    for y, wanted, grad_x, grad_weights, x, weights in workers(size).run(identity_experts, dtype, top_k, experts_local):
        torch.testing.assert_close(y, wanted, rtol=0, atol=0)
        torch.testing.assert_close(grad_x, weights.sum(1, keepdim=True).expand_as(x), rtol=0, atol=0)
        torch.testing.assert_close(grad_weights, x.sum(1, keepdim=True).expand_as(weights), rtol=0, atol=0)


def host_copies():
    """How often a dispatch asks for values of a tensor."""
    axis = expert_axis()
    comm = AllToAllComm()
    comm.setup(axis, spec(4))
    with mock.patch.object(module, "_to_host", wraps=module._to_host) as to_host:
        sent = comm.dispatch(torch.randn(3, 8), routing("random", 3, 4, 2), torch.rand(3, 2))
        comm.combine(sent.rows_RD, sent.handle)
    return to_host.call_count


def test_counts_are_copied_to_the_host_once(workers):
    assert workers(2).run(host_copies) == [1, 1]


def setup_error(num_experts, d_model):
    with pytest.raises(ValueError) as caught:
        AllToAllComm().setup(expert_axis(), spec(num_experts, d_model=d_model[dist.get_rank()]))
    return str(caught.value)


def test_experts_that_cannot_be_shared_out_are_refused_with_the_numbers(workers):
    for rank, text in enumerate(workers(2).run(setup_error, 5, (8, 8))):
        assert f"axis 'expert', rank {rank} of 2" in text
        assert "num_experts (5) must be divisible by the number of processes that share them (2)" in text


def test_processes_that_mean_different_models_are_told_so(workers):
    text = workers(2).run(setup_error, 4, (8, 16))[1]
    assert "rank 1 has [4, 2, 16, 4], all have [[4, 2, 8, 4], [4, 2, 16, 4]]" in text


def leave_the_other_alone():
    comm = AllToAllComm()
    comm.setup(expert_axis(), spec(4))
    if dist.get_rank() == 0:
        raise KeyError("out of data")
    comm.dispatch(torch.randn(3, 8), routing("random", 3, 4, 2), torch.rand(3, 2))


def test_an_exchange_that_fails_says_where_it_stands(workers):
    with pytest.raises(WorkerError) as caught:
        workers(2).run(leave_the_other_alone)
    assert "rank 0 of 2 failed" in str(caught.value)
    assert (
        "rank 1 failed after it: RuntimeError: comm 'all_to_all' on axis 'expert', rank 1 of 2: the exchange of counts "
        "failed; most often because another process of the axis (global ranks [0, 1])"
    ) in str(caught.value)


@pytest.mark.parametrize("plugin", [AllToAllComm, LocalComm])
def test_setup_comes_first(plugin):
    comm = plugin()
    comm.teardown()
    with pytest.raises(RuntimeError, match=r"setup\(\) comes before dispatch\(\)"):
        comm.dispatch(torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2))


def test_operands_that_do_not_fit_the_spec_are_refused_with_all_shapes():
    comm = AllToAllComm()
    comm.setup(Axis("expert", (0,), 0), spec(4))
    with pytest.raises(
        ValueError, match=r"\[\(3, 8\), \(3, 2\), \(3, 2\)\] expected, got \[\(3, 9\), \(3, 1\), \(3, 2\)\]"
    ):
        comm.dispatch(torch.randn(3, 9), torch.zeros(3, 1, dtype=torch.int64), torch.rand(3, 2))


def test_an_axis_without_a_group_is_refused():
    with pytest.raises(ValueError, match="needs a process group, but axis 'expert', rank 0 of 2 has none"):
        AllToAllComm().setup(Axis("expert", (0, 1), 0), spec(4))


def test_local_refuses_an_axis_of_two():
    with pytest.raises(ValueError, match="2 processes share them; take 'all_to_all'"):
        LocalComm().setup(Axis("expert", (0, 1), 0), spec(4))
