"""Recomputing blocks or experts changes memory, and nothing else: outputs, gradients, statistics, routing."""

import pytest
import torch
from torch import Tensor, nn

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model.router import RoutingStats
from olmoe_lightning.model.transformer import KVCache, Transformer

CONFIG = ModelConfig(
    vocab_size=23,
    d_model=12,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    num_experts=6,
    top_k=2,
    expert_hidden=8,
    shared_hidden=6,
    num_dense_layers=1,
    dense_hidden=8,
    balance_loss_coeff=0.5,
    router_z_loss_coeff=0.1,
    selection_bias=True,
    init_std=0.3,
)
OPTIONS = {
    "learned": {},
    "sigmoid": {"score_function": "sigmoid", "normalize_weights": True},
    "topk_softmax": {"score_function": "topk_softmax"},
    "jitter": {"router_jitter": 0.2},
    "random_mode": {"router_mode": "random"},
    "uniform_mode": {"router_mode": "uniform"},
    "sequence_scope": {"balance_loss_scope": "sequence", "norm_placement": "peri"},
}


def model_of(**changes) -> Transformer:
    model = Transformer(CONFIG.replace(**changes))
    model.init_weights(0)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, CONFIG.vocab_size, (2, 2, 9), generator=generator)
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [-1] * 2], dtype=torch.int32)
    return ids, documents, labels.masked_fill(documents < 0, -100)


def step(model: Transformer) -> tuple[Tensor, RoutingStats, dict[str, Tensor]]:
    """Hidden states, statistics and all gradients, random draws from one seed."""
    ids, documents, labels = batch()
    torch.manual_seed(5)
    hidden, stats = model(ids, documents, labels != -100, torch.tensor(0.5))
    model.loss(hidden, labels).total.backward()
    return hidden.detach(), stats, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["block", "experts"])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS.keys())
def test_outputs_gradients_and_statistics_are_the_same(changes, recompute):
    hidden, stats, grads = step(model_of(**changes))
    again_hidden, again_stats, again_grads = step(model_of(**changes, recompute=recompute))
    # The same operations on the same numbers: equal to the last bit.
    assert torch.equal(again_hidden, hidden)
    for name, value in stats._asdict().items():
        assert torch.equal(getattr(again_stats, name), value), name
    for name, grad in grads.items():
        assert torch.equal(again_grads[name], grad), name


@pytest.mark.parametrize(("recompute", "routed", "computed"), [("none", 1, 1), ("experts", 1, 2), ("block", 2, 2)])
def test_what_is_computed_twice_is_counted_once(recompute, routed, computed):
    model = model_of(recompute=recompute)
    calls = {"router": 0, "experts": 0}
    for part in calls:
        module = getattr(model.blocks[1].moe, part)
        module.register_forward_pre_hook(lambda *_, part=part: calls.__setitem__(part, calls[part] + 1))
    _, stats, _ = step(model)
    assert calls == {"router": routed, "experts": computed}
    counted = (batch()[2] != -100).sum()
    assert stats.num_tokens == counted
    assert stats.counts.sum(-1).tolist() == [counted * CONFIG.top_k] * 2


class Nudge(nn.Module):
    """Passes its input at the first call and flips its sign at the second, which reverses the order of all logits.

    Rounding does this to near ties only; here every choice would come out differently.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) if self.calls == 1 else -self.inner(x)


def choices(model: Transformer) -> list[Tensor]:
    """The experts that each call of the last block's router returned."""
    found: list[Tensor] = []
    router = model.blocks[-1].moe.router
    router.register_forward_hook(lambda _module, _inputs, routing: found.append(routing.expert_ids))
    return found


def test_recompute_repeats_the_first_choice_when_the_scores_come_out_differently():
    model = model_of(recompute="block", num_experts=24)
    model.blocks[-1].ffn_norm = Nudge(model.blocks[-1].ffn_norm)
    found = choices(model)
    _, stats, grads = step(model)
    assert len(found) == 2
    assert torch.equal(found[0], found[1])
    # The experts' gradients went to those that tokens with a label chose, and to no others.
    counted = (batch()[2] != -100).flatten()
    idle = torch.bincount(found[0][counted].flatten(), minlength=24) == 0
    assert idle.any()
    for name in ("w_gate_up", "w_down"):
        grad = grads[f"blocks.2.moe.experts.{name}"]
        assert grad.isfinite().all()
        assert torch.equal(grad.flatten(1).abs().sum(1) == 0, idle)
    assert stats.counts[-1].sum() == counted.sum() * CONFIG.top_k


def test_without_the_replay_the_choice_would_have_been_another():
    """Negative control: the same two inputs, routed afresh."""
    model = model_of()
    router = model.blocks[-1].moe.router
    x = torch.randn(1, 9, CONFIG.d_model)
    nudge = Nudge(nn.Identity())
    assert not torch.equal(router(nudge(x)).expert_ids, router(nudge(x)).expert_ids)


def test_ties_are_broken_alike_in_forward_and_recompute():
    model = model_of(recompute="block")
    with torch.no_grad():
        model.blocks[-1].moe.router.weight.zero_()
    found = choices(model)
    step(model)
    assert len(found) == 2
    assert all(torch.equal(ids, torch.tensor([[0, 1]] * 18)) for ids in found)


def test_two_forwards_before_one_backward_keep_their_choices_apart():
    """Pipeline schedules hold several microbatches; the second one's choice must not be replayed for the first."""
    ids, _, _ = batch()
    plain, recomputed = model_of(), model_of(recompute="block")
    for model in (plain, recomputed):
        hidden = [model(ids[row : row + 1])[0] for row in range(2)]
        (hidden[0].square().sum() + 2 * hidden[1].square().sum()).backward()
    for (name, a), b in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        if name != "head.weight":
            torch.testing.assert_close(b.grad, a.grad, atol=0, rtol=0, msg=name)


def test_recompute_saves_memory_for_the_backward_pass():
    """Negative control for the equalities above: something is indeed not kept."""

    def saved_elements(model: Transformer) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden, _ = model(batch()[0].repeat(8, 4))
            weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            total = sum(size for pointer, size in kept.items() if pointer not in weights)
        hidden.sum().backward()
        return total

    none, experts, block = (saved_elements(model_of(recompute=mode)) for mode in ("none", "experts", "block"))
    assert block < experts < none


@pytest.mark.parametrize("recompute", ["none", "block", "experts"])
def test_a_cache_is_filled_with_gradients_on_and_with_them_off(recompute):
    model = model_of(recompute=recompute)
    ids, _, _ = batch()
    with torch.no_grad():
        expected, _ = model(ids)
    for enabled in (True, False):
        cache = KVCache(model.config, ids.shape[1])
        with torch.set_grad_enabled(enabled):
            first, _ = model(ids[:, :4], cache=cache)
            assert cache.length() == 4
        torch.testing.assert_close(first, expected[:, :4], atol=1e-5, rtol=0)
