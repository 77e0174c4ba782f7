"""What does not fit is chosen without favour, counted exactly, and nothing that fits is touched.

The statistical tests draw from a fixed seed, so that they always say the same; their bounds are five standard
deviations of what an unbiased choice would give, and a positional choice (the negative control) is tens of them away.
"""

import math

import pytest
import torch
import torch.distributed as dist

from olmoe_lightning import ModelConfig
from olmoe_lightning.kernels import expert_mlp
from olmoe_lightning.model.moe import MoE
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm import CommSpec, RowwiseComm
from olmoe_lightning.plugins.comm.capacity import Admitted, admit
from olmoe_lightning.plugins.comm.conformance import ConformanceError, check_comm_plugin
from olmoe_lightning.tools.processes import WorkerError

CPU = torch.device("cpu")
EXPERTS, SIZE, K = 8, 2, 2


def routing(tokens, seed, experts=EXPERTS, ties=False, further=0):
    generator = torch.Generator().manual_seed(seed)
    ranking = torch.rand(tokens, experts, generator=generator).topk(K + further).indices
    weights = torch.rand(tokens, K, generator=generator)
    return ranking[:, :K], torch.full_like(weights, 0.5) if ties else weights, ranking[:, K:]


def load(admitted, size=SIZE, experts=EXPERTS):
    return torch.bincount(admitted.expert_ids_AK[admitted.keep_AK] // (experts // size), minlength=size).tolist()


# ------------------------------------------------------------------------------------------------- the decision


def test_what_fits_is_kept_to_the_last_route():
    ids, weights, further = routing(60, 0, further=2)
    most = int(torch.bincount(ids.flatten() // 4).max())
    for fallback in (None, further):
        enough = admit(ids, weights, fallback, most, EXPERTS, SIZE)
        assert enough.keep_AK.all()
        assert torch.equal(enough.expert_ids_AK, ids)
    assert (~admit(ids, weights, None, most - 1, EXPERTS, SIZE).keep_AK).sum() == 1


@pytest.mark.parametrize("capacity", [1, 17, 40])
def test_each_process_keeps_its_heaviest_routes(capacity):
    ids, weights, _ = routing(60, 1)
    kept = admit(ids, weights, None, capacity, EXPERTS, SIZE).keep_AK
    for process in range(SIZE):
        mine = ids // 4 == process
        wanted = weights[mine].sort(descending=True).values[:capacity]
        assert torch.equal(weights[mine & kept].sort(descending=True).values, wanted)


def test_spill_takes_the_next_expert_with_room_and_no_expert_twice():
    ids, weights, further = routing(200, 2, further=3)
    crowded = torch.where(ids < 4, ids, ids)  # about half for each process
    spilled = admit(crowded, weights, further, 210, EXPERTS, SIZE)
    tight = admit(crowded, weights, further, 150, EXPERTS, SIZE)
    plain = admit(crowded, weights, None, 150, EXPERTS, SIZE)
    assert spilled.keep_AK.all()
    assert load(tight) == [150, 150]
    assert torch.equal(tight.keep_AK & plain.keep_AK, plain.keep_AK)  # no route loses its place to a spilled route
    for admitted in (spilled, tight):
        for token in range(200):
            mine = admitted.expert_ids_AK[token][admitted.keep_AK[token]].tolist()
            assert len(set(mine)) == len(mine)
            moved = set(mine) - set(ids[token].tolist())
            assert moved <= set(further[token].tolist())


def test_a_spilled_route_goes_to_the_best_expert_that_has_room():
    ids, weights = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.9, 0.8], [0.7, 0.1]])
    # Three routes fit on each process; the fourth of the first process moves: 2 is of the same full process, 5 is not.
    admitted = admit(ids, weights, torch.tensor([[3, 4], [2, 5]]), 3, EXPERTS, SIZE)
    assert admitted.keep_AK.all()
    assert admitted.expert_ids_AK.tolist() == [[0, 1], [0, 5]]


# ------------------------------------------------------------------------------------------------- no favour


def positional(ids, weights, fallback, capacity, experts, size, seed=0):
    """The mistake: rows are cut off behind the capacity, in the order of local expert, source and token."""
    keep = torch.zeros_like(ids, dtype=torch.bool)
    order = ids.flatten().argsort(stable=True)
    for process in range(size):
        mine = order[ids.flatten()[order] // (experts // size) == process]
        keep.view(-1)[mine[:capacity]] = True
    return Admitted(ids, keep)


def bias(decide, ties):
    """Largest deviation of the drop rate of an expert, a source or a place in the batch, in standard deviations."""
    tokens, rounds = 64, 60
    groups = {"expert": EXPERTS, "source": SIZE, "place": 8, "choice": K}
    dropped = {name: torch.zeros(size) for name, size in groups.items()}
    asked = {name: torch.zeros(size) for name, size in groups.items()}
    for seed in range(rounds):
        ids, weights, _ = routing(tokens, seed, ties=ties)
        lost = ~decide(ids, weights, None, 48, EXPERTS, SIZE).keep_AK
        place = torch.arange(tokens)[:, None].expand_as(ids)
        which = {"expert": ids, "source": place * SIZE // tokens, "place": place * 8 // tokens}
        which["choice"] = torch.arange(K).expand_as(ids)
        for name, group in which.items():
            dropped[name] += torch.bincount(group[lost], minlength=groups[name])
            asked[name] += torch.bincount(group.flatten(), minlength=groups[name])
    rate = dropped["source"].sum() / asked["source"].sum()
    assert 0.1 < rate < 0.5
    return {
        name: float(((dropped[name] / asked[name] - rate) / (rate * (1 - rate) / asked[name]).sqrt()).abs().max())
        for name in groups
    }


@pytest.mark.parametrize("ties", [False, True])
def test_no_expert_source_or_place_is_favoured(ties):
    found = bias(admit, ties)
    assert max(found.values()) < 5, found


def test_a_positional_choice_would_be_found():
    found = bias(positional, False)
    assert found["expert"] > 20
    assert found["place"] > 5


def test_the_seed_turns_ties_and_nothing_else():
    ids, weights, _ = routing(64, 3, ties=True)
    first, second = (admit(ids, weights, None, 40, EXPERTS, SIZE, seed).keep_AK for seed in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, admit(ids, weights, None, 40, EXPERTS, SIZE, 0).keep_AK)
    ids, weights, _ = routing(64, 3)
    first, second = (admit(ids, weights, None, 40, EXPERTS, SIZE, seed).keep_AK for seed in (0, 1))
    assert torch.equal(first, second)


# ------------------------------------------------------------------------------------------------- the plugin


def axis_here():
    if not dist.is_initialized():
        return Axis("expert", (0,), 0)
    return Axis("expert", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def tokens_of(rank):
    return 24 + 8 * rank


D = 8


def train(size, **options):
    """A layer on the tokens of ``size`` processes: what one of them gets, outputs, gradients and drops."""
    axis = axis_here()
    comm = RowwiseComm(**options)
    comm.setup(axis, CommSpec(EXPERTS, K, D, torch.float32, CPU))
    generator = torch.Generator().manual_seed(0)
    counts = [tokens_of(rank) for rank in range(size)]
    x = torch.randn(sum(counts), D, generator=generator)
    ids, weights, further = routing(sum(counts), 5, further=2)
    experts = [torch.randn(EXPERTS, *shape, generator=generator) for shape in ((2 * D, D), (D, D))]
    start = sum(counts[: axis.rank])
    own, local = slice(start, start + counts[axis.rank]), EXPERTS // size
    mine = slice(axis.rank * local, (axis.rank + 1) * local)
    x, weights = x[own].clone().requires_grad_(), weights[own].clone().requires_grad_()
    extra = {"fallback_ids_TF": further[own]} if comm.fallbacks else {}
    sent = comm.dispatch(x, ids[own], weights, **extra)
    y = comm.combine(
        expert_mlp(sent.rows_RD, *(e[mine] for e in experts), sent.row_weights_R, sent.offsets_E), sent.handle
    )
    y.square().sum().backward()
    drops = comm.drops
    counted = None if drops is None else [
        drops.routes, drops.tokens, drops.tokens_losing_any, drops.tokens_losing_all, drops.dropped_by_expert,
        drops.dropped_by_rank, drops.moved_by_expert, drops.weight_removed_by_expert,
    ]  # fmt: skip
    return y.detach(), x.grad, weights.grad, counted, len(sent.rows_RD), int(sent.offsets_E[-1])


def by_definition(size, capacity, spill):
    """The same from one decision and a loop over tokens."""
    counts = [tokens_of(rank) for rank in range(size)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), D, generator=generator).requires_grad_()
    ids, weights, further = routing(sum(counts), 5, further=2)
    experts = [torch.randn(EXPERTS, *shape, generator=generator) for shape in ((2 * D, D), (D, D))]
    admitted = admit(ids, weights, further if spill else None, capacity, EXPERTS, size)
    weights = weights.clone().requires_grad_()
    rows = []
    for token in range(len(x)):
        row = torch.zeros(D)
        for k in range(K):
            if admitted.keep_AK[token, k]:
                e = int(admitted.expert_ids_AK[token, k])
                gate, up = (experts[0][e] @ x[token]).chunk(2)
                row = row + experts[1][e] @ (torch.nn.functional.silu(gate) * up) * weights[token, k]
        rows.append(row)
    y = torch.stack(rows)
    y.square().sum().backward()
    return y.detach(), x.grad, weights.grad, admitted, ids, weights.detach(), counts


@pytest.mark.parametrize("overflow", ["drop", "spill"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_kept_computes_what_the_definition_says_and_drops_are_counted(workers, size, overflow):
    factor = {1: 0.6, 2: 0.7, 4: 0.5}[size]
    options = {"capacity_factor": factor, "overflow": overflow}
    by_rank = workers(size).run(train, size, **options) if size > 1 else [train(1, **options)]
    capacity = math.ceil(factor * tokens_of(size - 1) * K)
    y, grad_x, grad_weights, admitted, ids, weights, counts = by_definition(size, capacity, overflow == "spill")
    assert not admitted.keep_AK.all()
    lost = (~admitted.keep_AK).split(counts)
    for rank, found in enumerate(by_rank):
        part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        for ours, theirs in zip(found[:3], (y, grad_x, grad_weights), strict=True):
            # sums over tens of products of fp32 numbers, in another order
            torch.testing.assert_close(ours, theirs[part], rtol=1e-4, atol=1e-3)
        assert found[4] == capacity
        assert found[5] <= capacity
        gone, chosen, weight = lost[rank], ids[part], weights[part]
        expected = [
            gone.numel(),
            len(gone),
            gone.any(1).sum(),
            gone.all(1).sum(),
            torch.bincount(chosen[gone], minlength=EXPERTS),
            torch.bincount(chosen[gone] // (EXPERTS // size), minlength=size),
            torch.bincount(chosen[(admitted.expert_ids_AK[part] != chosen) & ~gone], minlength=EXPERTS),
            torch.zeros(EXPERTS).index_add(0, chosen[gone], weight[gone]),
        ]
        for counter, want in zip(found[3], expected, strict=True):
            torch.testing.assert_close(counter, torch.as_tensor(want).to(counter.dtype))


def shared_by(tokens, **options):
    """A layer on this process' part of the tokens: outputs, gradients and what was dropped by expert."""
    axis = axis_here()
    comm = RowwiseComm(**options)
    comm.setup(axis, CommSpec(EXPERTS, K, D, torch.float32, CPU))
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(0))
    ids, weights, further = routing(tokens, 7, further=2)
    own = slice(axis.rank * tokens // axis.size, (axis.rank + 1) * tokens // axis.size)
    x = x[own].clone().requires_grad_()
    extra = {"fallback_ids_TF": further[own]} if comm.fallbacks else {}
    sent = comm.dispatch(x, ids[own], weights[own], **extra)
    local = EXPERTS // axis.size
    expert_R = torch.bucketize(torch.arange(len(sent.rows_RD)), sent.offsets_E, right=True) + axis.rank * local
    y = comm.combine(sent.rows_RD * (sent.row_weights_R * (1 + expert_R))[:, None], sent.handle)
    y.square().sum().backward()
    return y.detach(), x.grad, comm.drops.dropped_by_expert, comm.drops.moved_by_expert


@pytest.mark.parametrize("overflow", ["drop", "spill"])
def test_any_number_of_processes_drops_the_same_routes(workers, overflow):
    options = {"capacity_factor": 0.8, "capacity_groups": 4, "overflow": overflow}
    y, grad, dropped, moved = shared_by(64, **options)
    assert dropped.sum() > 5
    assert moved.any() == (overflow == "spill")
    for size in (2, 4):
        by_rank = workers(size).run(shared_by, 64, **options)
        assert torch.equal(sum(found[2] for found in by_rank), dropped)
        assert torch.equal(sum(found[3] for found in by_rank), moved)
        torch.testing.assert_close(torch.cat([found[0] for found in by_rank]), y)
        torch.testing.assert_close(torch.cat([found[1] for found in by_rank]), grad)
    # with groups that go by the number of processes it is not so
    assert not torch.equal(shared_by(64, **options | {"capacity_groups": None})[2], dropped)


def check_with_room(overflow):
    try:
        return check_comm_plugin(lambda: Roomy(overflow), axis_here(), timeout=20)
    except ConformanceError as error:
        return error


class Roomy(RowwiseComm):
    """As much room as there can be, with all that limits it at work."""

    def __init__(self, overflow):
        super().__init__(capacity_factor=100.0, overflow=overflow)


@pytest.mark.parametrize("overflow", ["drop", "error"])
def test_a_capacity_that_suffices_changes_nothing(workers, overflow):
    for results in workers(2).run(check_with_room, overflow):
        assert isinstance(results, list), results


def too_many():
    train(2, capacity_factor=0.3, overflow="error")


def test_overflow_is_an_error_on_all_processes_if_it_is_to_be(workers):
    with pytest.raises(WorkerError) as caught:
        workers(2).run(too_many)
    text = str(caught.value)
    assert "more routes go to a process than the 20 rows" in text
    assert "(capacity_factor 0.3, at most 32 tokens of a process, top_k 2)" in text
    assert "failed after it: RuntimeError: comm 'rowwise': more routes" in text


def config(**options):
    return ModelConfig.preset("tiny", d_model=16, num_experts=EXPERTS, top_k=K, expert_hidden=8, **options)


def test_the_layer_gives_a_spilling_plugin_its_router_s_ranking():
    torch.manual_seed(0)
    layer = MoE(config())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    comm = RowwiseComm(capacity_factor=0.8, overflow="spill", fallbacks=3)
    comm.setup(Axis("expert", (0,), 0), CommSpec(EXPERTS, K, 16, torch.float32, CPU))
    layer.place(0, 1, comm)
    x = torch.randn(2, 20, 16)
    ranking = layer.router(x, None, None, 3).ranking
    assert ranking.shape == (40, K + 3)
    assert torch.equal(ranking[:, :K], layer.router(x).expert_ids)
    seen = []
    dispatch = comm.dispatch
    comm.dispatch = lambda *args, **extra: seen.append(extra) or dispatch(*args, **extra)
    layer(x)[0].sum().backward()
    assert torch.equal(seen[0]["fallback_ids_TF"], ranking[:, K:])
    assert comm.drops.dropped_by_expert.sum() == 80 - 64  # one process: whoever is full is full for all
    with pytest.raises(ValueError, match=r"needs fallback_ids_TF of shape \(40, 3\), got None"):
        dispatch(x.view(40, 16), ranking[:, :K], torch.rand(40, K))


def test_a_recomputed_layer_counts_its_drops_once():
    comm = RowwiseComm(capacity_factor=0.5)
    comm.setup(Axis("expert", (0,), 0), CommSpec(EXPERTS, K, D, torch.float32, CPU))
    ids, weights, _ = routing(20, 0)
    x = torch.randn(20, D, requires_grad=True)

    def layer(x):
        sent = comm.dispatch(x, ids, weights)
        return comm.combine(sent.rows_RD.sin(), sent.handle)

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert comm.drops.dropped_by_expert.sum() == comm.drops.dropped_by_rank.sum() == 20
    comm.drops.reset()
    assert comm.drops.routes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_factor": 0}, r"capacity_factor \(0\) must be positive"),
        ({"overflow": "wait"}, r"overflow \('wait'\) must be 'drop', 'spill' or 'error'"),
        ({"fallbacks": 0}, r"fallbacks \(0\) must be at least 1"),
        ({"capacity_groups": 2}, r"capacity_groups \(2\) must be at least 1, and need a capacity_factor \(None\)"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        RowwiseComm(**options)


def test_each_process_has_whole_groups():
    with pytest.raises(ValueError, match=r"capacity_groups \(3\) must be a multiple of the 1 processes and a divisor"):
        RowwiseComm(capacity_factor=1.0, capacity_groups=3).setup(
            Axis("expert", (0,), 0), CommSpec(EXPERTS, K, D, torch.float32, CPU)
        )


def test_more_fallbacks_than_other_experts_are_refused():
    comm = RowwiseComm(capacity_factor=1.0, overflow="spill", fallbacks=3)
    with pytest.raises(ValueError, match=r"fallbacks \(3\) are more than .* \(num_experts 4 - top_k 2\)"):
        comm.setup(Axis("expert", (0,), 0), CommSpec(4, 2, D, torch.float32, CPU))
