"""Balance loss and router z-loss: values from theory, masks, scopes, gradients of explicit formulas.

The routers have an identity weight, so that the input is the logits; probabilities are set through their logarithms.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from olmoe_lightning.model.router import Router, Routing

pytestmark = pytest.mark.usefixtures("kernels")

IMPOSSIBLE = -1e4  # the logit of probability zero: its exponential underflows to an exact 0


@pytest.fixture
def loss_router(identity_router: Callable[..., Router]) -> Callable[..., Router]:
    """An identity router with a balance coefficient of one and, unless asked for, without a z-loss."""

    def build(experts: int, top_k: int, **changes) -> Router:
        return identity_router(experts, top_k, **({"balance_loss_coeff": 1.0, "router_z_loss_coeff": 0.0} | changes))

    return build


def per_token(routing: Routing) -> float:
    return (routing.aux_loss / routing.stats.num_tokens).item()


def rows(*probabilities: list[float]) -> Tensor:
    """Logits [1, T, E] of the given probabilities."""
    return torch.tensor([[[math.log(p) if p else IMPOSSIBLE for p in row] for row in probabilities]])


def some_logits(batch: int = 4, seq: int = 6, experts: int = 5, seed: int = 0) -> Tensor:
    return 2 * torch.randn(batch, seq, experts, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------- values from theory


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 1), (4, 2), (8, 3), (5, 5), (64, 8)])
def test_perfect_balance_costs_exactly_the_coefficient(loss_router, experts, top_k, scores):
    """Token t prefers the experts t, t+1, ... in a circle: each expert is chosen and liked as much as any other."""
    preferences = torch.linspace(2, -2, experts) if experts > 1 else torch.zeros(1)
    x = torch.stack([preferences.roll(shift) for shift in range(experts)])[None]
    for coeff in (1.0, 0.01):
        routing = loss_router(experts, top_k, balance_loss_coeff=coeff, score_function=scores)(x)
        assert routing.stats.counts.tolist() == [top_k] * experts
        assert per_token(routing) == pytest.approx(coeff, rel=1e-6)
        assert routing.stats.balance_sum.item() == pytest.approx(experts, rel=1e-6)  # without its coefficient


@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (8, 2), (64, 8)])
def test_total_collapse_costs_experts_over_choices(loss_router, experts, top_k):
    x = torch.full((1, 10, experts), IMPOSSIBLE)
    x[..., :top_k] = 0.0
    assert per_token(loss_router(experts, top_k)(x)) == pytest.approx(experts / top_k, rel=1e-6)


def test_six_tokens_cost_less_than_balance_although_one_expert_gets_two_thirds(loss_router):
    routing = loss_router(2, 1)(rows(*[[1.0, 0.0]] * 2, *[[0.4, 0.6]] * 4))
    assert routing.stats.counts.tolist() == [2, 4]
    assert per_token(routing) == pytest.approx(14 / 15, rel=1e-6)


def test_two_experts_reach_seven_eighths_at_a_quarter_of_the_load(loss_router):
    """A quarter of the tokens is certain, the others are undecided; a tie goes to the first expert."""
    routing = loss_router(2, 1)(rows([0.0, 1.0], *[[0.5, 0.5]] * 3))
    assert routing.stats.counts.tolist() == [3, 1]
    assert per_token(routing) == pytest.approx(7 / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("experts", "active", "top_k"), [(64, 16, 1), (64, 64, 1), (8, 2, 1), (16, 8, 4)], ids=lambda value: str(value)
)
def test_dead_experts_that_soak_up_probability_hide_collapse(loss_router, experts, active, top_k):
    """Each token spreads evenly over its K active experts and all the dead ones, and ties decide for the active."""
    spread = experts - active + top_k
    x = torch.full((1, active, experts), IMPOSSIBLE)
    x[..., active:] = 0.0
    for token in range(active):
        for offset in range(top_k):
            x[0, token, (token + offset) % active] = 0.0
    routing = loss_router(experts, top_k)(x)
    assert routing.stats.counts.tolist() == [top_k] * active + [0] * (experts - active)
    value = experts * top_k / (active * spread)
    assert per_token(routing) == pytest.approx(value, rel=1e-6)
    if (experts, active) == (64, 16):
        assert round(value, 4) == 0.0816


@pytest.mark.parametrize(("experts", "top_k"), [(5, 1), (8, 3), (6, 6)])
def test_the_loss_is_one_plus_the_centred_inner_product(loss_router, experts, top_k):
    routing = loss_router(experts, top_k)(some_logits(experts=experts))
    stats = routing.stats
    load = stats.counts / (top_k * stats.num_tokens)
    probability = stats.prob_sum / stats.num_tokens
    uniform = 1 / experts
    centred = 1 + experts * ((load - uniform) * (probability - uniform)).sum()
    assert per_token(routing) == pytest.approx(centred.item(), rel=1e-5)


def test_imbalance_costs_more_than_balance(loss_router):
    x = some_logits(1, 200, 8)
    crooked = x + torch.linspace(2, 0, 8)
    assert per_token(loss_router(8, 2)(crooked)) > per_token(loss_router(8, 2)(x)) + 0.1


# ------------------------------------------------------------------------------------------------------------ scopes


def test_the_sequence_scope_does_not_depend_on_how_sequences_are_grouped(loss_router):
    router = loss_router(5, 2, router_z_loss_coeff=0.1, balance_loss_scope="sequence")
    x = some_logits()
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    results = []
    for size in (4, 2, 1):
        leaf = x.clone().requires_grad_()
        total = sum(
            router(piece, piece_mask).aux_loss
            for piece, piece_mask in zip(leaf.split(size), mask.split(size), strict=True)
        )
        total.backward()
        results.append((total.detach(), leaf.grad))
    for total, grad in results[1:]:
        torch.testing.assert_close(total, results[0][0], atol=0, rtol=1e-6)
        torch.testing.assert_close(grad, results[0][1], atol=1e-7, rtol=1e-5)
    # Negative control: the microbatch scope does.
    whole = loss_router(5, 2)(x, mask).aux_loss
    assert (sum(loss_router(5, 2)(x[i : i + 1], mask[i : i + 1]).aux_loss for i in range(4)) - whole).abs() > 1e-2


def test_the_sequence_scope_weighs_sequences_by_their_tokens(loss_router):
    """One balanced sequence of two tokens (loss 1) and one collapsed one of four (loss 2)."""
    likes = {0: [0.0, IMPOSSIBLE], 1: [IMPOSSIBLE, 0.0]}
    x = torch.tensor([[likes[0], likes[1], likes[0], likes[0]], [likes[0]] * 4])
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    routing = loss_router(2, 1, balance_loss_scope="sequence")(x, mask)
    assert routing.aux_loss.item() == pytest.approx(2 * 1 + 4 * 2, rel=1e-6)
    assert routing.stats.num_tokens == 6


def test_z_loss_and_its_gradient_add_up_over_microbatches(loss_router):
    router = loss_router(5, 2, balance_loss_coeff=0.0, router_z_loss_coeff=0.3)
    x = some_logits()
    whole = x.clone().requires_grad_()
    total = router(whole).aux_loss
    total.backward()
    parts = x.clone().requires_grad_()
    split = sum(router(piece).aux_loss for piece in parts.split([1, 3]))
    split.backward()
    torch.testing.assert_close(split, total, atol=0, rtol=1e-6)  # fp32 sums in another order
    torch.testing.assert_close(parts.grad, whole.grad, atol=0, rtol=0)
    assert total.item() == pytest.approx(0.3 * x.double().logsumexp(-1).square().sum().item(), rel=1e-6)


# ------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 50.0])
def test_masked_tokens_never_count(loss_router, scope, garbage):
    x = some_logits(3, 6)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[:, :4] = True
    dirty = x.masked_fill(~mask[..., None], garbage)
    router = loss_router(5, 2, router_z_loss_coeff=0.1, balance_loss_scope=scope)
    masked, alone = router(dirty, mask), router(x[:, :4])
    torch.testing.assert_close(masked.aux_loss, alone.aux_loss)
    for found, expected in zip(masked.stats, alone.stats, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)
    assert masked.expert_ids.shape == (18, 2)  # they are routed all the same


def test_masked_tokens_get_no_gradient_and_do_not_change_that_of_others(loss_router):
    x = some_logits(2, 6)
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    whole, alone = x.clone().requires_grad_(), x[:, :4].clone().requires_grad_()
    router = loss_router(5, 2, router_z_loss_coeff=0.1)
    router(whole, mask).aux_loss.backward()
    router(alone).aux_loss.backward()
    assert torch.equal(whole.grad[:, 4:], torch.zeros_like(whole.grad[:, 4:]))
    torch.testing.assert_close(whole.grad[:, :4], alone.grad)


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_a_batch_without_tokens_that_count_costs_nothing(loss_router, scope):
    router = loss_router(5, 2, router_z_loss_coeff=0.1, balance_loss_scope=scope)
    x = some_logits().requires_grad_()
    routing = router(x, torch.zeros(4, 6, dtype=torch.bool))
    routing.aux_loss.backward()
    assert routing.aux_loss == 0
    assert all((field == 0).all() for field in routing.stats)
    assert torch.equal(x.grad, torch.zeros_like(x))


# --------------------------------------------------------------------------------------------------------- gradients


def test_the_gradient_of_top_1_softmax_is_the_textbook_formula(loss_router):
    """dL/dz_ti = (N/T) p_ti (f_i - f·p_t); our sum over tokens is T times L."""
    x = some_logits().requires_grad_()
    routing = loss_router(5, 1)(x)
    routing.aux_loss.backward()
    probs = x.detach().flatten(0, 1).softmax(-1)
    load = routing.stats.counts / len(probs)
    expected = 5 * probs * (load - (probs @ load)[:, None])
    torch.testing.assert_close(x.grad.flatten(0, 1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
def test_value_and_gradient_equal_autograd_of_the_explicit_formula(loss_router, scores, scope):
    coeff, z_coeff, experts, top_k = 0.3, 0.05, 5, 2
    router = loss_router(
        experts,
        top_k,
        balance_loss_coeff=coeff,
        router_z_loss_coeff=z_coeff,
        score_function=scores,
        balance_loss_scope=scope,
    )
    x = some_logits().requires_grad_()
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    routing = router(x, mask)
    routing.aux_loss.backward()

    logits = x.detach().double().requires_grad_()
    probs = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if scores == "sigmoid" else logits.softmax(-1)
    ids = routing.expert_ids.view(4, 6, top_k)
    expected = z_coeff * logits.logsumexp(-1).square()[mask].sum()
    for piece in [[0, 1, 2, 3]] if scope == "microbatch" else [[0], [1], [2], [3]]:
        kept = mask[piece]
        tokens = kept.sum()
        load = torch.bincount(ids[piece][kept].flatten(), minlength=experts) / tokens
        expected = expected + coeff * tokens * experts / top_k * (load * probs[piece][kept].mean(0)).sum()
    expected.backward()
    torch.testing.assert_close(routing.aux_loss.double(), expected, atol=0, rtol=1e-5)
    torch.testing.assert_close(x.grad.double(), logits.grad, atol=1e-6, rtol=1e-5)


# --------------------------------------------------------------------------------------------------- sigmoids near zero


def with_offset(logits: Tensor, ids: Tensor) -> Tensor:
    """The balance loss of one scope where sigmoids, made safe by an offset, are divided by their sum: the control."""
    scores = logits.sigmoid() + 1e-7
    load = torch.bincount(ids.flatten(), minlength=logits.shape[-1])
    return (load * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum() * logits.shape[-1] / ids.shape[-1]


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", [-1.0, -20.0, -100.0, -1000.0])
def test_small_sigmoids_do_not_make_the_balance_loss_small(loss_router, level, dtype, scope):
    """Value, gradient and weights are those of the sigmoids in fp64, where those at -1000 are zero, by logarithms."""
    experts, top_k = 6, 2
    # Multiples of 8, which bf16 can tell apart at -1000 too, and an expert that all tokens prefer.
    x = level + 8.0 * torch.randint(-1, 1, (3, 5, experts), generator=torch.Generator().manual_seed(0))
    x[..., 4] = level + 8.0
    x = x.to(dtype).requires_grad_()
    router = loss_router(experts, top_k, score_function="sigmoid", normalize_weights=True, balance_loss_scope=scope).to(
        dtype
    )
    routing = router(x)
    routing.aux_loss.backward()

    logits = x.detach().double().requires_grad_()
    log_scores = torch.nn.functional.logsigmoid(logits)
    probs, ids = log_scores.softmax(-1), routing.expert_ids.view(3, 5, top_k)
    expected = torch.zeros(())
    for piece in [[0, 1, 2]] if scope == "microbatch" else [[0], [1], [2]]:
        load = torch.bincount(ids[piece].flatten(), minlength=experts)
        expected = expected + experts / top_k * (load * probs[piece].mean((0, 1))).sum()
    expected.backward()
    assert expected > 1.5 * 15  # balance would be 15
    torch.testing.assert_close(routing.aux_loss.double(), expected, atol=0, rtol=1e-5)
    assert logits.grad.abs().max() > 1e-4
    # Half of the last of 8 bits of a gradient in bf16.
    torch.testing.assert_close(x.grad.double(), logits.grad, atol=1e-6, rtol=2e-5 if dtype == torch.float32 else 4e-3)
    weights = log_scores.flatten(0, 1).gather(1, routing.expert_ids).softmax(-1)
    torch.testing.assert_close(routing.weights.double(), weights, atol=0, rtol=1e-5)
    assert (routing.expert_ids[:, 0] == 4).all()
    entropy = -(probs * probs.log()).sum()
    torch.testing.assert_close(routing.stats.entropy_sum.double(), entropy, atol=0, rtol=1e-5)

    # Negative control: by the formula with an offset the loss of this very choice is lowered to that of balance.
    offset = with_offset(x.detach().float().flatten(0, 1), routing.expert_ids)
    if level <= -100:
        assert offset == pytest.approx(15, rel=1e-4)
    elif level == -1:
        assert offset == pytest.approx(routing.aux_loss.item(), rel=0.2)


def test_descent_on_the_balance_loss_balances_small_sigmoids_instead_of_shrinking_them(loss_router):
    """The common part of all logits has next to no gradient where sigmoids are exponentials."""
    x = torch.full((1, 8, 4), -60.0)
    x[..., 0] += 2.0
    x.requires_grad_()
    loss_router(4, 1, score_function="sigmoid")(x).aux_loss.backward()
    assert x.grad[..., 0].min() > 0.1
    assert x.grad.sum(-1).abs().max() < 1e-6


# ---------------------------------------------------------------------------------------------------- extreme logits


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("size", [1e4, 1e10, 1e19, 1e25])
def test_the_z_loss_of_huge_logits_is_finite_and_right(loss_router, scores, size):
    """Squares of 1e25 are beyond fp32; their gradient is not."""
    router = loss_router(4, 2, balance_loss_coeff=0.0, router_z_loss_coeff=0.25, score_function=scores)
    x = (size * torch.tensor([[[1.0, 0.5, -1.0, 0.0], [-1.0, -0.5, -2.0, -1.5]]])).requires_grad_()
    routing = router(x)
    routing.aux_loss.backward()
    logits = x.detach().double().requires_grad_()
    expected = logits.logsumexp(-1).square().sum()
    (0.25 * expected).backward()
    torch.testing.assert_close(routing.stats.z_sum, expected.detach(), atol=0, rtol=1e-6)
    torch.testing.assert_close(x.grad.double(), logits.grad, atol=0, rtol=1e-6)
    assert routing.weights.isfinite().all()
    if scores != "sigmoid":
        assert routing.stats.entropy_sum == 0


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("low", [-200.0, -1e4])
def test_weights_of_experts_whose_scores_vanish_are_normalised_all_the_same(loss_router, scores, low):
    """A bias, or a choice made elsewhere, falls on experts that the softmax rounds to zero."""
    router = loss_router(6, 2, score_function=scores, normalize_weights=True)
    x = torch.full((1, 3, 6), low)
    x[..., 0] = 0.0
    x[..., 5] += 1.0
    x.requires_grad_()
    routing = router(x, chosen_TK=torch.tensor([[5, 4]] * 3))
    expected = torch.tensor([1.0, 0.0]).softmax(0)
    torch.testing.assert_close(routing.weights, expected.expand(3, 2))
    routing.weights[:, 0].sum().backward()
    pull = (expected[0] * expected[1]).item()
    torch.testing.assert_close(x.grad[0, :, 4:], torch.tensor([-pull, pull]).expand(3, 2))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("level", [-1000.0, 0.0, 1000.0])
def test_experts_are_told_apart_where_their_scores_are_all_zero_or_one(loss_router, scores, level):
    """One expert is far above the others, so that their softmax vanishes as well."""
    x = level + torch.tensor([[[0.0, 1.0, 300.0, 2.0, 5.0, 3.0, 4.0, 0.5]]])
    assert loss_router(8, 3, score_function=scores)(x).expert_ids.tolist() == [[2, 4, 6]]
    if level <= 0:  # the third best is in the third group, beside the second best
        limited = loss_router(8, 3, score_function=scores, num_groups=4, top_k_groups=2)
        assert limited(x).expert_ids.tolist() == [[2, 4, 5]]
