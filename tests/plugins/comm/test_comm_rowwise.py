"""What the rowwise plugin promises beyond the conformance suite: no value on the host, and buffers that are leased."""

import contextlib
import gc
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from olmoe_lightning.kernels import expert_mlp, reference_kernels
from olmoe_lightning.kernels.memory.virtual import VirtualRanks
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm import CommSpec, RowwiseComm
from olmoe_lightning.plugins.comm.leases import LeaseError
from olmoe_lightning.tools.processes import WorkerError

CPU = torch.device("cpu")
ONE = Axis("expert", (0,), 0)
EXPERTS, K, D = 4, 2, 8


def make(axis=ONE, **options):
    comm = RowwiseComm(**options)
    comm.setup(axis, CommSpec(EXPERTS * axis.size, K, D, torch.float32, CPU))
    return comm


def expert_axis():
    return Axis("expert", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def batch(axis=ONE, tokens=5, seed=0):
    """Tokens, ids, weights, and the experts' two parameters."""
    generator = torch.Generator().manual_seed(100 * seed + axis.rank)
    x = torch.randn(tokens, D, generator=generator, requires_grad=True)
    ids = torch.rand(tokens, EXPERTS * axis.size, generator=generator).topk(K).indices
    weights = torch.rand(tokens, K, generator=generator, requires_grad=True)
    experts = [torch.randn(EXPERTS, *shape, generator=generator) for shape in ((2 * D, D), (D, D))]
    return x, ids, weights, [expert.requires_grad_() for expert in experts]


def layer(comm, x, ids, weights, experts):
    sent = comm.dispatch(x, ids, weights)
    return comm.combine(expert_mlp(sent.rows_RD, *experts, sent.row_weights_R, sent.offsets_E), sent.handle)


# ------------------------------------------------------------------------------------------------- device residence


class NoValueOnTheHost(TorchDispatchMode):
    """Raises on operations that read a value of a tensor or whose shapes depend on one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "bincount", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if name in self.FORBIDDEN or function.__name__ == "repeat_interleave.Tensor":
            raise AssertionError(f"{function} reads a value")
        if name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        ):
            raise AssertionError(f"{function} with a boolean index reads values")
        if name == "_to_copy" and (kwargs or {}).get("device") is not None:
            raise AssertionError("a copy to another device")
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_value_on_the_host():
    """The mode, and the ways from a CPU tensor to Python that pass it by."""

    def forbidden(*args):
        raise AssertionError("a value is read")

    names = ("tolist", "numpy", "__bool__", "__int__", "__index__", "__float__", "item", "__array__")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(torch.Tensor, name, forbidden))
        stack.enter_context(NoValueOnTheHost())
        yield


LIMITS = [
    {},
    {"capacity_factor": 100.0},
    {"capacity_factor": 100.0, "overflow": "spill"},
    {"capacity_factor": 100.0, "overflow": "error"},
]


def travel_without_looking(kernels, options):
    axis = expert_axis()
    comm = make(axis, **options)
    x, ids, weights, _ = batch(axis, tokens=3 + axis.rank)
    extra = {"fallback_ids_TF": (ids + 1) % 2} if comm.fallbacks else {}
    with reference_kernels() if kernels == "reference" else contextlib.nullcontext(), no_value_on_the_host():
        sent = comm.dispatch(x, ids, weights, **extra)
        y = comm.combine(sent.rows_RD * sent.row_weights_R[:, None], sent.handle)
        y.sum().backward()
    return [tensor.detach() for tensor in (y, weights.sum(1, keepdim=True) * x, x.grad, weights.grad, x, weights)]


@pytest.mark.parametrize("options", LIMITS)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_no_value_of_a_tensor_is_read_on_the_host_forward_or_backward(workers, kernels, options):
    for y, wanted, grad_x, grad_weights, x, weights in workers(2).run(travel_without_looking, kernels, options):
        # two products and a sum of fp32 numbers of order one
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad_x, weights.sum(1, keepdim=True).expand_as(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad_weights, x.sum(1, keepdim=True).expand_as(weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.tolist(),
        lambda t: t.sum().item(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: bool(t.any()),
        lambda t: t.numpy(),
        lambda t: torch.bincount(t),
        lambda t: torch.repeat_interleave(t, t),
    ],
)
def test_a_look_at_a_value_is_noticed(look):
    with no_value_on_the_host(), pytest.raises(AssertionError, match=r"read|value"):
        look(torch.arange(3))


def travel_without_values(memory, options, seen):
    axis = Axis("expert", tuple(range(memory.size)), memory.rank)
    comm = RowwiseComm(**options)
    comm.setup_on(memory, axis, CommSpec(EXPERTS * axis.size, K, D, torch.float32, CPU))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, ids, weights, _ = batch(axis, tokens=3 + axis.rank)
        extra = {"fallback_ids_TF": ids} if comm.fallbacks else {}
        sent = comm.dispatch(x, ids, weights, **extra)
        y = comm.combine(sent.rows_RD * sent.row_weights_R[:, None], sent.handle)
        y.sum().backward()
    assert isinstance(y, FakeTensor)
    seen[memory.rank] = [tuple(tensor.shape) for tensor in (sent.rows_RD, sent.offsets_E, y, x.grad, weights.grad)]


@pytest.mark.parametrize("options", [*LIMITS[:3], {"capacity_factor": 0.5}])
def test_all_shapes_follow_from_shapes_as_fake_tensors_show(options):
    ranks, seen = VirtualRanks(2, timeout=20), {}
    threads = [
        threading.Thread(target=travel_without_values, args=(ranks.memory(rank), options, seen)) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    capacity = 4 if options.get("capacity_factor") == 0.5 else 14
    assert seen == {r: [(capacity, D), (EXPERTS,), (3 + r, D), (3 + r, D), (3 + r, K)] for r in range(2)}


# ------------------------------------------------------------------------------------------------- leases


def test_a_buffer_is_leased_from_dispatch_until_the_backward_pass_is_over():
    comm = make()
    x, ids, weights, experts = batch()
    assert comm.pool.in_use == 0
    y = layer(comm, x, ids, weights, experts)
    assert comm.pool.in_use == 1
    y.sum().backward()
    del y
    assert comm.pool.in_use == 0
    assert len(comm.pool.regions) == 2  # rows, and the gradients on their way to the experts


def test_without_gradients_the_lease_is_over_with_the_rows():
    comm = make()
    with torch.no_grad():
        for seed in range(3):
            layer(comm, *batch(seed=seed))
            assert comm.pool.in_use == 0
    assert len(comm.pool.regions) == 1


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_there_are_as_many_buffers_as_microbatches_in_flight(order):
    comm = make()
    batches = [batch(seed=seed) for seed in range(3)]
    for _ in range(2):
        outputs = [layer(comm, *each) for each in batches]
        assert comm.pool.in_use == 3
        for i in order:
            outputs[i].sum().backward()
            outputs[i] = None
        assert comm.pool.in_use == 0
    assert len(comm.pool.regions) == 4


def test_a_buffer_that_is_leased_cannot_be_used_again():
    comm = make()
    sent = comm.dispatch(*batch()[:3])
    (leased,) = (buffer for buffer in range(len(comm.pool.regions)) if comm.pool.leased(buffer))
    with pytest.raises(LeaseError, match=f"receive buffer {leased} is leased and cannot be used again"):
        comm.pool.lease(leased)
    rows = sent.rows_RD[0]
    del sent
    assert comm.pool.leased(leased)  # one row of it is enough
    del rows
    comm.pool.lease(leased)


def use_three_at_once():
    axis = expert_axis()
    comm = make(axis, max_buffers=2)
    kept = [comm.dispatch(*batch(axis)[:3]) for _ in range(2)]
    with pytest.raises(LeaseError) as caught:
        comm.dispatch(*batch(axis)[:3])
    del kept
    comm.dispatch(*batch(axis)[:3])
    return str(caught.value)


def test_more_buffers_than_allowed_are_refused_on_all_processes(workers):
    texts = workers(2).run(use_three_at_once)
    assert texts[0] == texts[1]
    assert "all 2 receive buffers" in texts[0]
    assert "max_buffers=2" in texts[0]


def gradients(run, leaves):
    for leaf in leaves:
        leaf.grad = None
    run().square().sum().backward()
    return [leaf.grad.clone() for leaf in leaves]


def recompute(what):
    """Deviation of the gradients with recompute from those without, and leases that are left."""
    axis = expert_axis()
    comm = make(axis)
    x, ids, weights, experts = batch(axis)
    leaves = [x, weights, *experts]

    def plain():
        return layer(comm, x, ids, weights, experts)

    def recomputed():
        if what == "layer":
            return checkpoint(layer, comm, x, ids, weights, experts, use_reentrant=False)
        sent = comm.dispatch(x, ids, weights)
        rows = checkpoint(expert_mlp, sent.rows_RD, *experts, sent.row_weights_R, sent.offsets_E, use_reentrant=False)
        return comm.combine(rows, sent.handle)

    expected = gradients(plain, leaves)
    found = gradients(recomputed, leaves)
    again = gradients(recomputed, leaves)
    gc.collect()
    same = [torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, found, again, strict=True)]
    return same, comm.pool.in_use, len(comm.pool.regions)


@pytest.mark.parametrize("what", ["layer", "experts"])
def test_recompute_gives_the_same_bits_and_leaves_no_lease(workers, what):
    for same, in_use, buffers in workers(2).run(recompute, what):
        assert same == [True] * 4
        assert in_use == 0
        assert buffers <= 3


def test_a_graph_that_is_kept_keeps_its_rows():
    comm = make()
    x, ids, weights, experts = batch()
    y = layer(comm, x, ids, weights, experts).square().sum()
    first = torch.autograd.grad(y, [x, *experts], retain_graph=True)
    layer(comm, *batch(seed=1)).sum().backward()  # others come and go meanwhile
    assert comm.pool.in_use == 1
    second = torch.autograd.grad(y, [x, *experts])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def grow():
    axis = expert_axis()
    comm = make(axis)
    found = []
    for tokens in (1, 40 * axis.rank, 300):
        x, ids, weights, _ = batch(axis, tokens)
        sent = comm.dispatch(x, ids, weights)
        y = comm.combine(sent.rows_RD * sent.row_weights_R[:, None], sent.handle)
        found.append(torch.allclose(y, weights.sum(1, keepdim=True) * x, rtol=1e-5, atol=1e-6))
    return found


def test_token_counts_may_grow_and_differ(workers):
    assert workers(2).run(grow) == [[True] * 3] * 2


def other_dtypes():
    """Under autocast tokens, rows and results differ in dtype from each other and from the spec."""
    axis = expert_axis()
    comm = make(axis)
    x, ids, weights, experts = batch(axis)
    plain = layer(comm, x, ids, weights, experts)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(comm, x, ids, weights, experts)
    half = layer(comm, x.double().to(torch.bfloat16), ids, weights, [e.to(torch.bfloat16) for e in experts])
    y.float().sum().backward()
    close = [((found.float() - plain).abs().max() / plain.abs().max()).item() for found in (y, half)]
    return y.dtype, half.dtype, x.grad.dtype, close


def test_rows_may_have_another_dtype_than_was_said(workers):
    for y, half, grad, close in workers(2).run(other_dtypes):
        assert y == half == torch.bfloat16
        assert grad == torch.float32
        assert max(close) < 0.05  # some roundings of bf16, 2^-8 each


# ------------------------------------------------------------------------------------------------- errors


def setup_error(d_model):
    with pytest.raises(ValueError) as caught:
        RowwiseComm().setup(expert_axis(), CommSpec(4, K, d_model[dist.get_rank()], torch.float32, CPU))
    return str(caught.value)


def test_processes_that_mean_different_models_are_told_so(workers):
    text = workers(2).run(setup_error, (8, 16))[1]
    assert "rank 1 has [4, 2, 16, 4], all have [[4, 2, 8, 4], [4, 2, 16, 4]]" in text


def leave_the_other_alone():
    axis = expert_axis()
    comm = make(axis)
    if axis.rank == 0:
        raise KeyError("out of data")
    comm.dispatch(*batch(axis)[:3])


def test_an_exchange_that_fails_names_who_is_missing(workers):
    with pytest.raises(WorkerError) as caught:
        workers(2).run(leave_the_other_alone)
    assert "rank 0 of 2 failed" in str(caught.value)
    assert "rank 1 failed after it: RuntimeError: comm 'rowwise' on axis 'expert', rank 1 of 2: the exchange of counts "
    assert "has ended or does something else: rank 0 of 2 (process" in str(caught.value)
    assert "has ended" in str(caught.value)


def test_rows_that_were_not_dispatched_are_refused():
    comm = make()
    sent = comm.dispatch(*batch()[:3])
    with pytest.raises(ValueError, match=r"rows of shape \(10, 8\) expected, as they were dispatched, got \(9, 8\)"):
        comm.combine(sent.rows_RD[:9], sent.handle)


def test_setup_comes_first_and_options_are_checked():
    comm = RowwiseComm()
    comm.teardown()
    with pytest.raises(RuntimeError, match=r"setup\(\) comes before dispatch\(\)"):
        comm.dispatch(*batch()[:3])
    with pytest.raises(ValueError, match=r"max_buffers \(0\) must be at least 1"):
        RowwiseComm(max_buffers=0)
    with pytest.raises(ValueError, match="needs a process group, but axis 'expert', rank 0 of 2 has none"):
        RowwiseComm().setup(Axis("expert", (0, 1), 0), CommSpec(4, K, D, torch.float32, CPU))
