"""Triton's route map and movements of rows, interpreted, do what the PyTorch definition does: on virtual ranks."""

import math
import mmap
import threading

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from olmoe_lightning.kernels import rowwise
from olmoe_lightning.kernels.choice import interpreted_kernels, on_gpu, reference_kernels
from olmoe_lightning.kernels.gpu import routes as gpu_routes
from olmoe_lightning.kernels.gpu import rows as gpu
from olmoe_lightning.kernels.memory.virtual import VirtualMemory, VirtualRanks
from olmoe_lightning.kernels.routes import Routes, Window
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm import CommSpec, RowwiseComm

CPU = torch.device("cpu")
NAN = math.nan
UNRESERVED = 0x4000  # MAP_NORESERVE: Python 3.11 has no name for it


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(wide, dtype):
    """As Triton's interpreter stores sums: it cuts fp32 to bf16, where GPUs round to the nearest."""
    if dtype != torch.bfloat16:
        return wide.to(dtype)
    return (wide.view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


def random_routing(tokens, experts, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(k).indices
    return ids, torch.rand(tokens, k, generator=generator) > 0.3


# ------------------------------------------------------------------------------------------------- the route map

MAPS = {
    "no_tokens": (0, 8, 2),
    "one_route": (1, 4, 1),
    "one_choice": (70, 3, 1),
    "exactly_two_blocks": (64, 8, 4),
    "more_experts_than_a_piece": (50, 70, 6),
    "one_expert": (300, 1, 1),
    "many_blocks": (4200, 5, 2),  # more blocks than are summed up at once
}


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "k"), MAPS.values(), ids=MAPS.keys())
def test_the_route_map_is_the_reference_bit_for_bit(tokens, experts, k, drop):
    ids, keep = random_routing(tokens, experts, k)
    keep = keep if drop else None
    base = torch.randperm(experts, generator=torch.Generator().manual_seed(1)).to(torch.int32) * 1000
    local = max(experts // 2, 1)
    with reference_kernels():
        wanted = rowwise._place(ids, keep, base, local)
        counts = rowwise.count_routes(ids, keep, experts)
    rank, row = gpu.place_routes(ids, keep, base, local)
    found = gpu.count_routes(ids, keep, experts)
    for a, b in ((rank, wanted.rank_TK), (row, wanted.row_TK), (found, counts)):
        assert a.dtype == b.dtype == torch.int32
        assert torch.equal(a, b)


@pytest.mark.parametrize("drop", [False, True])
def test_skewed_routing_and_ids_in_any_layout_are_mapped_alike(drop):
    ids = torch.cat([torch.full((2, 200), 3), torch.tensor([[1, 0, 3], [7, 3, 1]])], 1).t()  # not contiguous
    keep = (torch.arange(406) % 3 != 0).view(2, 203).t() if drop else None
    base = torch.arange(8, dtype=torch.int32)
    with reference_kernels():
        wanted = rowwise._place(ids, keep, base, 4)
    rank, row = gpu.place_routes(ids, keep, base, 4)
    assert torch.equal(rank, wanted.rank_TK)
    assert torch.equal(row, wanted.row_TK)
    assert (row == -1).any() == drop


def test_sorted_places_are_those_of_a_stable_sort():
    ids, _ = random_routing(150, 9, 3)
    place, ends = gpu_routes.sort_routes(ids, 9)
    order = torch.argsort(ids.reshape(-1), stable=True)
    assert torch.equal(place.view(-1).long().argsort(), order)
    assert not torch.equal(order, torch.argsort(ids.reshape(-1), stable=True, descending=True))
    assert torch.equal(ends, torch.bincount(ids.reshape(-1), minlength=9).cumsum(0))


# ------------------------------------------------------------------------------------------------- movements of rows


class Case:
    """Routes of every virtual rank, windows full of NaN, and numbers to move."""

    def __init__(self, size, tokens, experts, k, width, dtype, drop, padding=0):
        self.size, self.width, self.dtype = size, width, dtype
        parts = [random_routing(tokens(rank), experts, k, rank) for rank in range(size)]
        parts = [(ids, keep if drop else None) for ids, keep in parts]
        self.x = [numbers(len(ids), width, seed=9 + r, dtype=dtype) for r, (ids, _) in enumerate(parts)]
        self.weights = [numbers(*ids.shape, seed=19 + r) for r, (ids, _) in enumerate(parts)]
        with reference_kernels():
            counts = torch.stack([rowwise.count_routes(ids, keep, experts) for ids, keep in parts])
            plans = [rowwise.plan_routes(ids, keep, counts, rank) for rank, (ids, keep) in enumerate(parts)]
        self.routes = [routes for routes, *_ in plans]
        self.received = [received for _, received, _ in plans]
        self.used = [int(ends[-1]) for *_, ends in plans]
        self.capacity = max(self.used) + 3
        self.padding = padding

    def windows(self):
        """Rows that lie apart when there is padding."""
        wide = [
            torch.full((self.capacity + 1, self.width + self.padding), NAN).to(self.dtype) for _ in range(self.size)
        ]
        return [Window(rows[:, : self.width], torch.full((self.capacity + 1,), NAN)) for rows in wide]


SHAPES = {
    "one_rank": (1, lambda r: 7, 4, 2, 16),
    "ranks_with_different_tokens": (3, lambda r: 5 * r, 6, 3, 20),
    "no_tokens": (2, lambda r: 0, 4, 2, 8),
    "one_choice": (2, lambda r: 9, 2, 1, 5),
    "one_column": (2, lambda r: 3, 4, 2, 1),
    "wider_than_a_piece": (2, lambda r: 2 - r, 4, 2, 2050),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def shape(request):
    return request.param


@pytest.mark.parametrize(("drop", "padding"), [(False, 0), (True, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_put_where_the_reference_puts_them_and_nowhere_else(shape, dtype, drop, padding):
    case = Case(*shape, dtype, drop, padding)
    found, wanted = case.windows(), case.windows()
    for rank in range(case.size):
        weights = case.weights[rank] if dtype != torch.bfloat16 else None  # once without
        gpu.put_rows(case.x[rank], weights, case.routes[rank], found)
        with reference_kernels():
            rowwise.put_rows(case.x[rank], weights, case.routes[rank], wanted)
    for a, b, used in zip(found, wanted, case.used, strict=True):
        # All but the spare row, where the reference puts what it must not write.
        torch.testing.assert_close(a.rows[:-1], b.rows[:-1], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(a.weights[:-1], b.weights[:-1], rtol=0, atol=0, equal_nan=True)
        assert a.rows[used:].isnan().all()
        assert not a.rows[:used].isnan().any()


@pytest.mark.parametrize(("weighted", "drop"), [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_summed_in_the_order_of_the_experts_and_nothing_else_is_read(shape, dtype, drop, weighted):
    case = Case(*shape, dtype, drop, padding=1)
    rows = [window.rows for window in case.windows()]
    for r, used in enumerate(case.used):
        rows[r][:used] = numbers(used, case.width, seed=r, dtype=dtype)
    for rank, routes in enumerate(case.routes):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        wanted = torch.zeros(len(routes.row_TK), case.width, dtype=wide)
        for t, pairs in enumerate(zip(routes.rank_TK.tolist(), routes.row_TK.tolist(), strict=True)):
            for k, (peer, row) in enumerate(zip(*pairs, strict=True)):
                if row >= 0:
                    factor = case.weights[rank][t, k] if weighted else 1.0
                    wanted[t] += rows[peer][row].to(wide) * factor
        weights = torch.where(routes.row_TK >= 0, case.weights[rank], NAN) if weighted else None
        found = gpu.sum_rows(rows, routes, weights)
        assert torch.equal(found, stored(wanted, dtype))  # the same operations in the same order
        with reference_kernels():
            reference = rowwise.sum_rows(rows, routes, weights)
        assert reference.dtype == dtype
        # The reference may add up to three numbers in another order; bf16 is rounded, or cut, once.
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-14}[dtype]
        torch.testing.assert_close(reference, found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_half_precision_is_rounded_once(dtype, large):
    rows = torch.tensor([[large], [1], [1]]).to(dtype)
    routes = Routes(torch.zeros(1, 3, dtype=torch.int32), torch.tensor([[0, 1, 2]], dtype=torch.int32))
    assert gpu.sum_rows([rows], routes).item() == large + 2
    assert ((rows[0] + rows[1]) + rows[2]).item() == large  # rounded at each step, it would be lost


@pytest.mark.parametrize("drop", [False, True])
def test_one_number_per_route_is_read(shape, drop):
    case = Case(*shape, torch.float32, drop)
    values = [torch.full((2 * case.capacity,), NAN)[::2] for _ in range(case.size)]  # every other number
    for r, used in enumerate(case.used):
        values[r][:used] = torch.arange(used) + 1000.0 * r
    for routes in case.routes:
        with reference_kernels():
            wanted = rowwise.gather_weights(values, routes)
        assert torch.equal(gpu.gather_weights(values, routes), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_others_sent_is_published_and_what_is_read_at_home_stays(shape, dtype):
    case = Case(*shape, dtype, drop=True, padding=2)
    for rank, window in enumerate(case.windows()):
        used, received = case.used[rank], case.received[rank]
        rows = torch.full((case.capacity, case.width), NAN).to(dtype)
        rows[:used] = numbers(used, case.width, dtype=dtype)
        own = gpu.publish_rows(rows, torch.arange(case.capacity) + 0.0, received, rank, window)
        source = torch.arange(case.size).repeat(received.shape[1]).repeat_interleave(received.t().reshape(-1))
        others = torch.zeros(case.capacity + 1, dtype=torch.bool)
        others[:used] = source != rank
        assert own is rows
        assert torch.equal(window.rows[others], rows[others[:-1]])
        assert window.rows[~others].isnan().all()  # neither what it sent to itself nor padding
        assert torch.equal(window.weights[:-1], torch.arange(case.capacity) + 0.0)
    if case.size == 3:
        assert 0 < sum(case.received[1][1]) < case.used[1]  # there were rows of both kinds


def test_tokens_and_weights_may_have_any_layout():
    ids = torch.tensor([[0], [1], [0]])
    routes, *_ = rowwise.plan_routes(ids, None, rowwise.count_routes(ids, None, 2)[None], 0)
    for x in (numbers(4, 3).t(), numbers(3, 9)[:, 2:6]):
        window = Window(torch.zeros(4, 4), torch.zeros(4))
        gpu.put_rows(x, numbers(3, 2)[:, :1], routes, [window])
        assert torch.equal(window.rows[:3], x[[0, 2, 1]])
        assert torch.equal(window.weights[:3], numbers(3, 2)[[0, 2, 1], 0])


def test_windows_of_another_dtype_or_layout_are_refused():
    routes = Routes(torch.zeros(2, 1, dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32))
    for rows in (torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(4, 3).t()):
        with pytest.raises(ValueError, match=r"put_rows needs windows with dense rows of torch.float32, got \(dtype, "):
            gpu.put_rows(numbers(2, 4), None, routes, [Window(rows, torch.zeros(3))])


def test_rows_far_behind_two_to_the_31_numbers_are_found():
    """Memory that is never touched costs nothing: 4.3 GB of it here."""
    stride = 2**30 + 8
    memory = mmap.mmap(-1, 6 * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | UNRESERVED)
    rows = torch.frombuffer(memory, dtype=torch.bfloat16).view(3, stride)[:, :8]
    assert 2 * rows.stride(0) > 2**31
    routes = Routes(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32))
    x = numbers(1, 8, dtype=torch.bfloat16)
    gpu.put_rows(x, None, routes, [Window(rows, torch.zeros(3))])
    assert torch.equal(rows, torch.cat([torch.zeros(2, 8).to(x.dtype), x]))
    assert torch.equal(gpu.sum_rows([rows], routes), x)
    window = Window(torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(3))
    gpu.publish_rows(rows, None, torch.tensor([[0], [3]], dtype=torch.int32), 0, window)
    assert torch.equal(window.rows, rows)
    rows.zero_()
    gpu.publish_rows(window.rows, None, torch.tensor([[0], [3]], dtype=torch.int32), 0, Window(rows, torch.zeros(3)))
    assert torch.equal(window.rows, rows)


# ------------------------------------------------------------------------------------------------- who takes them


def test_only_plain_cuda_tensors_take_triton_and_all_others_do_not():
    x = torch.ones(2, 3)
    assert not on_gpu(x)
    assert not on_gpu(torch.ones(2, device="meta"))
    with FakeTensorMode():
        assert not on_gpu(torch.ones(2, 3, device="cuda"))
        with interpreted_kernels():
            assert not on_gpu(torch.ones(2, 3))
    with interpreted_kernels():
        assert on_gpu(x, None)
        with reference_kernels():
            assert not on_gpu(x)
    assert not on_gpu(x)


class InTurn(VirtualMemory):
    """A virtual rank that computes while the others wait for it: the interpreter runs one kernel at a time."""

    turn = threading.Lock()

    def _gather(self, mine):
        self.turn.release()
        try:
            return super()._gather(mine)
        finally:
            self.turn.acquire()


def layer(ranks, rank, options, interpreted, dtype, found):
    """Dispatch, something that experts could do, combine, and back; on one virtual rank."""
    memory = InTurn(ranks, rank)
    with memory.turn, interpreted_kernels() if interpreted else reference_kernels():
        axis = Axis("expert", tuple(range(memory.size)), rank)
        comm = RowwiseComm(**options)
        comm.setup_on(memory, axis, CommSpec(6, 2, 12, dtype, CPU))
        ids, _ = random_routing(5 + rank, 6, 2, rank)
        x, weights = numbers(5 + rank, 12, seed=rank, dtype=dtype), numbers(5 + rank, 2, seed=9 + rank).abs()
        x.requires_grad_()
        weights.requires_grad_()
        sent = comm.dispatch(x, ids, weights)
        rows = sent.rows_RD.tanh() * sent.row_weights_R[:, None].to(dtype)
        y = comm.combine(rows, sent.handle)
        y.backward(numbers(*y.shape, seed=3, dtype=dtype))
        used = sent.offsets_E[-1]
        found[rank] = [each.detach().clone() for each in (sent.rows_RD[:used], sent.offsets_E, y, x.grad, weights.grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5}], ids=["dropless", "limited"])
def test_a_whole_layer_on_virtual_ranks_is_the_reference_forward_and_backward(monkeypatch, options, dtype):
    used = []
    for name in ("count_routes", "place_routes", "put_rows", "publish_rows", "sum_rows", "gather_weights"):
        kernel = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda *args, kernel=kernel, name=name: (used.append(name), kernel(*args))[1])
    results = []
    for interpreted in (True, False):
        ranks, found = VirtualRanks(3, timeout=30), {}
        threads = [
            threading.Thread(target=layer, args=(ranks, rank, options, interpreted, dtype, found)) for rank in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(found) == [0, 1, 2]
        assert len(set(used)) == 6  # all of Triton's in the first round ...
        results.append((found, len(used)))
    (triton_found, calls), (wanted, calls_after) = results
    assert calls == calls_after  # ... and none in the second
    for rank in range(3):
        for a, b in zip(triton_found[rank], wanted[rank], strict=True):
            # Of two rows of a token the sum is the same in any order; bf16 is cut here and rounded there.
            torch.testing.assert_close(a, b, rtol=2**-7 if a.dtype == torch.bfloat16 else 0, atol=0)


def test_without_the_interpreter_no_cpu_tensor_is_taken(monkeypatch):
    monkeypatch.setattr(triton.language, "sum", object.__new__(triton.runtime.JITFunction))
    with pytest.raises(RuntimeError, match="Triton was imported without TRITON_INTERPRET=1"), interpreted_kernels():
        pass
