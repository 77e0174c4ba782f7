"""The MoE layer equals a loop over tokens and experts, forward and backward."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import LocalTransport
from olmoe_lightning.model.experts import Experts
from olmoe_lightning.model.moe import MoE

pytestmark = pytest.mark.usefixtures("kernels")

CONFIG = ModelConfig(
    vocab_size=8,
    d_model=10,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    num_experts=6,
    top_k=2,
    expert_hidden=5,
    balance_loss_coeff=0.5,
    router_z_loss_coeff=0.1,
)
# fp32, sums of some ten terms of order one in another order.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def layer_of(**changes) -> MoE:
    torch.manual_seed(0)
    layer = MoE(CONFIG.replace(**changes))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    return layer


def swiglu_network(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    gate, up = (w_gate_up @ x).chunk(2)
    return w_down @ (F.silu(gate) * up)


def slow_layer(layer: MoE, x_BSD: Tensor) -> Tensor:
    """Token by token, the weight applied to the expert's output."""
    routing = layer.router(x_BSD)
    out = []
    for token, x in enumerate(x_BSD.flatten(0, 1)):
        y = torch.zeros_like(x)
        for expert, weight in zip(routing.expert_ids[token], routing.weights[token], strict=True):
            y = y + weight * swiglu_network(x, layer.experts.w_gate_up[expert], layer.experts.w_down[expert])
        if layer.shared is not None:
            y = y + swiglu_network(x, layer.shared.w_gate_up.weight, layer.shared.w_down.weight)
        out.append(y)
    return torch.stack(out).view_as(x_BSD)


def gradients(layer: MoE, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    names = [name for name, _ in layer.named_parameters()]
    found = torch.autograd.grad((y * pull).sum(), [x, *layer.parameters()], allow_unused=True)
    return dict(zip(["x", *names], found, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared_hidden": 7},
        {"top_k": 1},
        {"top_k": 6},
        {"normalize_weights": True, "restore_weight_scale": True},
        {"score_function": "sigmoid", "normalize_weights": True, "expert_weight_scale": 2.0},
        {"score_function": "topk_softmax"},
        {"router_mode": "uniform"},
        {"num_groups": 3, "top_k_groups": 2},
        {"recompute": "experts", "shared_hidden": 7},
    ],
    ids=str,
)
def test_layer_and_all_its_gradients_equal_a_loop_over_tokens(changes):
    layer = layer_of(**changes)
    x = torch.randn(2, 6, CONFIG.d_model, requires_grad=True)
    y, _ = layer(x)
    expected = slow_layer(layer, x)
    torch.testing.assert_close(y, expected, **CLOSE)
    reference = gradients(layer, x, expected)
    for name, grad in gradients(layer, x, y).items():
        torch.testing.assert_close(grad, reference[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_experts_without_tokens_get_zero_gradients_not_none():
    layer = layer_of(selection_bias=True)
    layer.router.selection_bias[:4] = -100.0  # everything goes to the last two
    x = torch.randn(1, 5, CONFIG.d_model)
    y, stats = layer(x)
    y.sum().backward()
    assert stats.counts.tolist() == [0, 0, 0, 0, 5, 5]
    for weight in (layer.experts.w_gate_up, layer.experts.w_down):
        assert torch.equal(weight.grad[:4], torch.zeros_like(weight.grad[:4]))
        assert (weight.grad[4:].flatten(1).abs().sum(1) > 0).all()


def test_the_router_learns_from_the_main_loss_alone():
    """Its weight enters inside the experts; the gradient must come back out."""
    layer = layer_of()
    y, _ = layer(torch.randn(1, 5, CONFIG.d_model))
    y.square().sum().backward()
    assert layer.router.weight.grad.abs().max() > 1e-3


def test_padding_rows_reach_neither_experts_nor_gradients():
    """A backend may hand over more rows than it filled; their contents and weights are arbitrary."""
    experts = Experts(3, 4, 5)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    rows, weights = torch.randn(6, 4), torch.rand(6)
    dirty_rows = torch.cat([rows, torch.full((3, 4), math.nan)]).requires_grad_()
    dirty_weights = torch.cat([weights, torch.full((3,), math.nan)]).requires_grad_()
    clean_rows, clean_weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    results = []
    for r, w in ((dirty_rows, dirty_weights), (clean_rows, clean_weights)):
        y = experts(r, w, offsets)
        grads = torch.autograd.grad(y[:6].square().sum(), [r, w, *experts.parameters()])
        results.append([y[:6], grads[0][:6], grads[1][:6], *grads[2:]])
    for dirty, clean in zip(*results, strict=True):
        torch.testing.assert_close(dirty, clean, atol=1e-6, rtol=1e-6)


def aux_gradients(layer: MoE, x: Tensor, aux_scale: Tensor | None) -> Tensor:
    layer.zero_grad()
    y, _ = layer(x, aux_scale=aux_scale)
    y.square().sum().backward()
    return layer.router.weight.grad.clone()


@pytest.mark.parametrize("recompute", ["none", "experts"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_auxiliary_gradient_is_the_scale_times_that_of_the_loss_and_absent_without_a_scale(scale, recompute):
    layer = layer_of(recompute=recompute)
    x = torch.randn(2, 6, CONFIG.d_model)
    without = aux_gradients(layer, x, None)
    with_aux = aux_gradients(layer, x, torch.tensor(scale))
    (alone,) = torch.autograd.grad(layer.router(x).aux_loss, layer.router.weight)
    assert alone.abs().max() > 1e-2
    torch.testing.assert_close(with_aux - without, scale * alone, atol=5e-5, rtol=1e-5)  # of sums up to 87 (ulp 8e-6)


def test_the_auxiliary_losses_do_not_change_the_output():
    layer = layer_of()
    x = torch.randn(2, 6, CONFIG.d_model)
    assert torch.equal(layer(x)[0], layer(x, aux_scale=torch.tensor(1.0))[0])


def test_masked_tokens_are_computed_and_only_not_counted():
    layer = layer_of()
    x = torch.randn(2, 6, CONFIG.d_model)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[0, :3] = True
    y, stats = layer(x, mask)
    assert torch.equal(y, layer(x)[0])
    assert stats.num_tokens == 3
    assert stats.counts.sum() == 3 * CONFIG.top_k


def test_the_output_of_a_token_does_not_depend_on_its_neighbours():
    layer = layer_of(shared_hidden=7)
    x = torch.randn(2, 6, CONFIG.d_model)
    y, _ = layer(x)
    torch.testing.assert_close(layer(x[1:, 2:4])[0], y[1:, 2:4], **CLOSE)


def test_a_bf16_layer_follows_the_fp32_one():
    layer = layer_of(shared_hidden=7, router_mode="uniform")  # the choice must not depend on rounding here
    x = torch.randn(2, 6, CONFIG.d_model)
    expected, _ = layer(x)
    y, stats = layer.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert stats.prob_sum.dtype == torch.float32
    # Three roundings to 8 bits on the way, of values up to about 4.
    torch.testing.assert_close(y.float(), expected, atol=6e-2, rtol=0)


def test_local_transport_is_the_sum_over_copies():
    transport = LocalTransport(6)
    x = torch.randn(5, 3)
    ids = torch.tensor([[0, 5], [5, 2], [2, 0], [1, 5], [5, 0]])
    weights = torch.rand(5, 2)
    sent = transport.dispatch(x, ids, weights)
    assert sent.offsets_E.tolist() == [3, 4, 6, 6, 6, 10]
    torch.testing.assert_close(
        transport.combine(sent.rows_RD * sent.row_weights_R[:, None], sent.handle), x * weights.sum(1, keepdim=True)
    )
