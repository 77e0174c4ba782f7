"""The router's choice, weights, modes and bias against slow code that is written from the definitions.

Most routers here have an identity weight, so that the input is the logits, exactly.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model.moe import MoE
from olmoe_lightning.model.router import Router, RoutingStats, top_k_stable

pytestmark = pytest.mark.usefixtures("kernels")

EXPERTS = 8


def some_logits(tokens: int = 20, experts: int = EXPERTS, seed: int = 0) -> Tensor:
    """Logits [1, T, E] of order one, without ties."""
    return 2 * torch.randn(1, tokens, experts, generator=torch.Generator().manual_seed(seed))


def route_one(logits: list[float], config: ModelConfig, bias: list[float]) -> tuple[list[int], list[float]]:
    """Choice and weights of one token, in Python's floats."""
    experts = range(len(logits))
    exponentials = [math.exp(logit) for logit in logits]
    if config.score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        scores = [value / sum(exponentials) for value in exponentials]
    wanted = logits if config.score_function == "topk_softmax" else scores
    wanted = [value + shift for value, shift in zip(wanted, bias, strict=True)]

    size = len(logits) // config.num_groups
    groups = [list(range(start, start + size)) for start in range(0, len(logits), size)]
    groups.sort(key=lambda group: -sum(sorted((wanted[e] for e in group), reverse=True)[:2]))
    eligible = {e for group in groups[: config.top_k_groups] for e in group}
    chosen = sorted((e for e in experts if e in eligible), key=lambda e: (-wanted[e], e))[: config.top_k]

    weights = [scores[e] for e in chosen]
    if config.score_function == "topk_softmax":
        weights = [exponentials[e] / sum(exponentials[c] for c in chosen) for e in chosen]
    if config.normalize_weights:
        weights = [weight / sum(weights) for weight in weights]
    if config.restore_weight_scale:
        weights = [weight * config.top_k for weight in weights]
    return chosen, [weight * config.expert_weight_scale for weight in weights]


SCALES = [
    {},
    {"normalize_weights": True},
    {"normalize_weights": True, "restore_weight_scale": True},
    {"restore_weight_scale": True, "expert_weight_scale": 2.5},
]
GROUPS = [
    {},
    {"num_groups": 4, "top_k_groups": 2},
    {"num_groups": 2, "top_k_groups": 1},
    {"num_groups": 8, "top_k_groups": 4},
]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
def test_choice_and_weights_equal_slow_code_written_from_the_definitions(identity_router, scores, groups, bias):
    for scale in SCALES:
        router = identity_router(score_function=scores, selection_bias=bias, **groups, **scale)
        if bias:
            router.selection_bias.copy_(torch.linspace(0.4, -0.4, EXPERTS))
        shift = router.selection_bias.tolist() if bias else [0.0] * EXPERTS
        x = some_logits()
        routing = router(x)
        expected = [route_one(row, router.config, shift) for row in x[0].double().tolist()]
        assert routing.expert_ids.tolist() == [chosen for chosen, _ in expected]
        assert routing.weights.dtype == torch.float32
        # Sigmoid scores carry an offset of 1e-7 that keeps them from being all zero.
        weights = torch.tensor([weights for _, weights in expected])
        torch.testing.assert_close(routing.weights, weights, atol=2e-6, rtol=2e-6)


def test_logits_are_the_product_with_the_router_weight(identity_router, router_config):
    config = router_config(d_model=5)
    router = Router(config)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(2, 7, 5)
    ours = router(x)
    theirs = identity_router()((x.double() @ router.weight.double().T).float())
    assert torch.equal(ours.expert_ids, theirs.expert_ids)
    torch.testing.assert_close(ours.weights, theirs.weights)
    assert ours.expert_ids.shape == (14, 3)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
def test_weights_sum_to_what_the_options_say(identity_router, scores):
    x = some_logits()
    ones = torch.ones(x.shape[1])
    normalised = {"score_function": scores, "normalize_weights": True}
    close = {"atol": 1e-6, "rtol": 1e-6}
    torch.testing.assert_close(identity_router(**normalised)(x).weights.sum(-1), ones, **close)
    restored = identity_router(**normalised, restore_weight_scale=True)
    torch.testing.assert_close(restored(x).weights.sum(-1), 3 * ones, **close)
    scaled = identity_router(**normalised, expert_weight_scale=0.5)
    torch.testing.assert_close(scaled(x).weights.sum(-1), 0.5 * ones, **close)


def test_hopeless_sigmoid_scores_still_normalise(identity_router):
    routing = identity_router(score_function="sigmoid", normalize_weights=True)(torch.full((1, 2, EXPERTS), -200.0))
    torch.testing.assert_close(routing.weights, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
def test_the_gradient_of_the_weights_reaches_the_logits(identity_router, scores):
    """Against autograd of the plain formula at the same choice."""
    router = identity_router(score_function=scores, normalize_weights=scores == "sigmoid")
    x = some_logits().requires_grad_()
    routing = router(x)
    pull = torch.randn(routing.weights.shape, generator=torch.Generator().manual_seed(1))
    routing.weights.backward(pull)

    logits = x.detach()[0].double().requires_grad_()
    if scores == "softmax":
        weights = logits.softmax(-1).gather(1, routing.expert_ids)
    elif scores == "sigmoid":
        weights = logits.sigmoid().gather(1, routing.expert_ids)
        weights = weights / weights.sum(-1, keepdim=True)
    else:
        weights = logits.gather(1, routing.expert_ids).softmax(-1)
    weights.backward(pull.double())
    torch.testing.assert_close(x.grad[0].double(), logits.grad, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------- ties

AWKWARD = {
    "all_equal": [0.25] * 6,
    "zeros_of_both_signs": [-0.0, 0.0, -0.0, 0.0, -0.0, 0.0],
    "negative": [-3.0, -1.0, -1.0, -2.0, -3.0, -1.0],
    "both_signs": [0.0, -1e-38, 1e-38, -0.0, -1.0, 1.0],
    "infinities": [-math.inf, 2.0, -math.inf, math.inf, 2.0, -math.inf],
    "subnormals": [1e-45, 0.0, -1e-45, 3e-45, 1e-45, -0.0],
    "neighbours": [1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1.0, -1.0, -1.0 - 2**-23],
    "extremes": [3.4028234663852886e38, -3.4028234663852886e38, 1.0, -1.0, 3.4028234663852886e38, 0.0],
}


@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
def test_equal_scores_are_ordered_by_index_and_others_by_value(values):
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))
    for k in range(1, len(values) + 1):
        assert top_k_stable(torch.tensor([values]), k).tolist() == [expected[:k]]


def test_every_order_of_awkward_values_is_a_stable_sort():
    values = [0.0, -0.0, -math.inf, 1e-45, -1.0]
    rows = [list(row) for row in itertools.permutations(values)]
    expected = [sorted(range(5), key=lambda index: (-row[index], index)) for row in rows]
    assert top_k_stable(torch.tensor(rows), 5).tolist() == expected


def test_a_strided_score_tensor_is_read_correctly():
    scores = torch.randn(6, 4).t()
    assert torch.equal(top_k_stable(scores, 6), torch.sort(scores, descending=True, stable=True).indices)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("value", [0.0, -5.0])
def test_all_equal_logits_choose_the_lowest_indices(identity_router, scores, value):
    routing = identity_router(score_function=scores)(torch.full((2, 3, EXPERTS), value))
    assert routing.expert_ids.tolist() == [[0, 1, 2]] * 6


def test_equal_groups_choose_the_lowest_group(identity_router):
    routing = identity_router(num_groups=4, top_k_groups=2)(torch.zeros(1, 2, EXPERTS))
    assert routing.expert_ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_nan_inputs_still_give_distinct_experts_that_exist(identity_router, groups):
    x = some_logits()
    x[0, 3] = math.nan
    x[0, 5, 2] = math.nan
    x[0, 7, 4] = -math.nan
    ids = identity_router(**groups)(x).expert_ids
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())


# ------------------------------------------------------------------------------------------------------------- bias


def test_the_selection_bias_moves_the_choice_and_never_the_weights(identity_router):
    plain = identity_router()
    biased = identity_router(selection_bias=True)
    x = some_logits()
    assert torch.equal(biased(x).expert_ids, plain(x).expert_ids)  # zero at first
    biased.selection_bias[5] = 10.0
    routing = biased(x)
    assert (routing.expert_ids[:, 0] == 5).all()
    assert not torch.equal(routing.expert_ids, plain(x).expert_ids)
    torch.testing.assert_close(routing.weights, x[0].softmax(-1).gather(1, routing.expert_ids))
    torch.testing.assert_close(routing.stats.prob_sum, plain(x).stats.prob_sum)


def test_a_group_is_judged_with_the_bias(identity_router):
    router = identity_router(num_groups=4, top_k_groups=2, selection_bias=True)
    router.selection_bias[6:] = 10.0
    assert all({6, 7} <= set(row) for row in router(some_logits()).expert_ids.tolist())


CASTS = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "to": lambda module: module.to(torch.bfloat16),
    "to_device_and_dtype": lambda module: module.to("cpu", torch.float16),
    "double_and_back": lambda module: module.double().float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_the_selection_bias_stays_fp32_with_its_value_through_casts(router_config, cast):
    layer = MoE(router_config(selection_bias=True, bias_update_rate=1e-3))
    value = torch.linspace(0.1, 0.3, EXPERTS) + 1e-5  # not representable in 16 bits
    layer.router.selection_bias.copy_(value)
    cast(layer)
    bias = layer.router.selection_bias
    assert bias.dtype == torch.float32
    assert torch.equal(bias, value)
    assert torch.equal(layer.state_dict()["router.selection_bias"], value)
    assert list(dict(layer.named_buffers())) == ["router.selection_bias"]
    layer.router.update_selection_bias(torch.arange(EXPERTS))
    assert layer.router.selection_bias.dtype == torch.float32


def test_the_bias_moves_towards_the_experts_below_the_mean_by_the_rate(identity_router):
    router = identity_router(4, 2, selection_bias=True, bias_update_rate=0.125)
    router.update_selection_bias(torch.tensor([10, 2, 5, 3]))
    assert router.selection_bias.tolist() == [-0.125, 0.125, 0.0, 0.125]
    router.update_selection_bias(torch.tensor([10, 2, 6, 2]))
    assert router.selection_bias.tolist() == [-0.25, 0.25, -0.125, 0.25]


def test_the_bias_moves_exactly_for_counts_that_no_float_holds(identity_router):
    """fp32 is coarser than 2^16 at these sizes and even fp64 is rounded; the sign must come from integers."""
    router = identity_router(4, 2, selection_bias=True, bias_update_rate=1.0)
    large = 2**55
    router.update_selection_bias(torch.tensor([large, large + 1, large - 1, large]))
    assert router.selection_bias.tolist() == [0.0, -1.0, 1.0, 0.0]


def test_no_tokens_leave_the_bias_where_it_is(identity_router):
    router = identity_router(4, 2, selection_bias=True, bias_update_rate=1.0)
    router.update_selection_bias(torch.zeros(4, dtype=torch.int64))
    assert router.selection_bias.tolist() == [0.0] * 4


def test_rate_zero_freezes_a_bias_that_still_acts(identity_router):
    router = identity_router(4, 2, selection_bias=True)
    router.selection_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0]))
    router.update_selection_bias(torch.tensor([10, 2, 5, 3]))
    assert router.selection_bias.tolist() == [0.0, 0.0, 0.0, 9.0]
    assert (router(some_logits(experts=4)).expert_ids[:, 0] == 3).all()


def test_without_a_bias_an_update_does_nothing(identity_router):
    router = identity_router(4, 2)
    router.update_selection_bias(torch.tensor([1, 2, 3, 4]))
    assert router.selection_bias is None
    assert "selection_bias" not in router.state_dict()


# ------------------------------------------------------------------------------------------- jitter, modes, dtypes


def test_jitter_acts_in_training_only_and_within_its_bounds(identity_router):
    router = identity_router(score_function="topk_softmax", top_k=EXPERTS, router_jitter=0.1)
    plain = identity_router(score_function="topk_softmax", top_k=EXPERTS)
    x = some_logits(200)
    assert torch.equal(router.eval()(x).weights, plain(x).weights)
    torch.manual_seed(0)
    routing = router.train()(x)
    # log softmax differences give the jittered logits back, up to a shift per token that two experts cancel.
    by_expert = torch.zeros_like(x[0]).scatter(1, routing.expert_ids, routing.weights).log()
    moved = (by_expert - by_expert[:, :1]) - (x[0] - x[0, :, :1])
    bound = 0.1 * (x[0].abs() + x[0, :, :1].abs())
    assert (moved.abs() <= bound + 1e-5).all()
    assert (moved.abs() > 0.5 * bound).any()  # negative control: it does act


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_jitter_and_fp32_scores_leave_the_layers_dtype_alone(router_config, dtype):
    layer = MoE(router_config(router_jitter=0.1, shared_hidden=4))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    y, _ = layer.to(dtype).train()(torch.randn(2, 5, EXPERTS).to(dtype))
    assert y.dtype == dtype


def test_a_16_bit_input_is_routed_in_fp32(identity_router):
    """Logits that differ by less than a 16-bit rounding are still told apart, since the product is taken in fp32."""
    router = identity_router(2, 1)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2.0**-7]]))
    x = torch.tensor([[[256.0, 1.0]]], dtype=torch.bfloat16)
    assert router.bfloat16()(x).expert_ids.tolist() == [[1]]
    logits = torch.nn.functional.linear(x, router.weight)
    assert logits[..., 0] == logits[..., 1]  # negative control: a bf16 product cannot


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "topk_softmax"])
def test_autocast_does_not_reach_the_router(identity_router, scores):
    """Trainers with a mixed precision run the model under autocast, which would round the logits to 16 bits."""
    router = identity_router(score_function=scores, normalize_weights=True)
    x = some_logits()
    plain = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(x, router.weight).dtype == torch.bfloat16  # negative control
        cast = router(x)
    for ours, reference in zip((*cast[:3], *cast.stats), (*plain[:3], *plain.stats), strict=True):
        assert ours.dtype == reference.dtype
        assert torch.equal(ours, reference)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 3, 16), (4, 4, 3), (6, 4, 9), (5, 2, 20)])
def test_the_uniform_mode_is_perfectly_balanced_and_weighs_by_the_scores(identity_router, experts, top_k, tokens):
    x = some_logits(tokens, experts)
    routing = identity_router(experts, top_k, router_mode="uniform")(x)
    assert routing.stats.counts.tolist() == [tokens * top_k // experts] * experts
    assert all(len(set(row)) == top_k for row in routing.expert_ids.tolist())
    torch.testing.assert_close(routing.weights, x[0].softmax(-1).gather(1, routing.expert_ids))


def test_the_random_mode_ignores_the_logits_and_keeps_the_router_in_the_graph(identity_router):
    router = identity_router(router_mode="random")
    x = some_logits(4000) + torch.tensor([9.0] + [0.0] * (EXPERTS - 1))
    torch.manual_seed(0)
    routing = router(x)
    # Each expert is chosen by 3/8 of 4000 tokens; six standard deviations of a binomial are 184.
    assert (routing.stats.counts - 1500).abs().max() < 184
    assert all(len(set(row)) == 3 for row in routing.expert_ids.tolist())
    assert (routing.weights > 0).all()
    assert (routing.weights[:, :-1] >= routing.weights[:, 1:]).all()  # the noise that chose is the noise that weighs
    (routing.weights * torch.rand_like(routing.weights)).sum().backward()
    assert router.weight.grad is not None
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))


def test_the_random_mode_depends_on_the_generator_alone(identity_router):
    router = identity_router(router_mode="random")
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(router(some_logits()))
    assert torch.equal(draws[0].expert_ids, draws[1].expert_ids)
    assert torch.equal(draws[0].weights, draws[1].weights)
    assert not torch.equal(draws[0].expert_ids, draws[2].expert_ids)


def test_a_choice_made_before_is_used_again_with_fresh_weights(identity_router):
    router = identity_router()
    x = some_logits()
    first = router(x)
    again = router(-x, chosen_TK=first.expert_ids)
    assert torch.equal(again.expert_ids, first.expert_ids)
    torch.testing.assert_close(again.weights, (-x[0]).softmax(-1).gather(1, first.expert_ids))
    assert not torch.equal(router(-x).expert_ids, first.expert_ids)  # negative control


# ------------------------------------------------------------------------------------------------------- statistics


def test_statistics_are_sums_that_add_up_over_batches_and_stack_over_layers(identity_router):
    router = identity_router()
    x = some_logits()
    whole, first, second = router(x).stats, router(x[:, :7]).stats, router(x[:, 7:]).stats
    merged = first.merge(second)
    for name, value in whole._asdict().items():
        if name != "balance_sum":  # a product of two means of a scope: not additive over other scopes
            torch.testing.assert_close(getattr(merged, name), value, atol=1e-5, rtol=1e-5)
        assert not value.requires_grad
    stacked = RoutingStats.stack([whole, whole])
    assert [tuple(field.shape) for field in stacked] == [(2, EXPERTS), (2, EXPERTS), (2,), (2,), (2,), ()]
    assert stacked.num_tokens == 20


def test_statistics_say_what_they_are_called(identity_router):
    x = some_logits()
    routing = identity_router()(x)
    stats = routing.stats
    probs = x[0].double().softmax(-1)
    assert stats.counts.tolist() == [sum(e in row for row in routing.expert_ids.tolist()) for e in range(EXPERTS)]
    assert stats.counts.dtype == torch.int64
    assert stats.counts.sum() == 20 * 3
    torch.testing.assert_close(stats.prob_sum.double(), probs.sum(0), atol=1e-5, rtol=0)
    torch.testing.assert_close(stats.entropy_sum.double(), -(probs * probs.log()).sum(), atol=1e-4, rtol=0)
    torch.testing.assert_close(stats.z_sum.double(), x[0].double().logsumexp(-1).square().sum(), atol=1e-3, rtol=1e-6)
    assert stats.num_tokens == 20


def test_entropy_is_zero_when_the_router_is_certain_and_log_e_when_it_knows_nothing(identity_router):
    certain = torch.full((1, 2, EXPERTS), -1e4)
    certain[..., 0] = 0.0
    assert identity_router()(certain).stats.entropy_sum == 0
    blank = identity_router()(torch.zeros(1, 2, EXPERTS)).stats.entropy_sum
    torch.testing.assert_close(blank, torch.tensor(2 * math.log(EXPERTS)))
