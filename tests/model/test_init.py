"""Initial weights are a pure function of (seed, name, expert): no layout, device or order of drawing changes them."""

import copy

import pytest
import torch
from torch import nn

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.model.experts import Experts
from olmoe_lightning.model.init import init_weights, seeded_generator, truncated_normal_
from olmoe_lightning.model.transformer import Transformer
from olmoe_lightning.training.experts import expert_parameters

CONFIG = ModelConfig(
    vocab_size=40,
    d_model=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=6,
    top_k=2,
    expert_hidden=12,
    shared_hidden=12,
    num_dense_layers=1,
    dense_hidden=12,
    norm_placement="peri",
    embed_norm=True,
    selection_bias=True,
    init_std=0.05,
)


def model_of(seed: int = 0, **changes) -> Transformer:
    model = Transformer(CONFIG.replace(**changes))
    model.init_weights(seed)
    return model


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before():
    first = model_of()
    torch.manual_seed(123)
    torch.randn(7)
    state = torch.get_rng_state()
    assert_same_state(first, model_of())
    assert torch.equal(torch.get_rng_state(), state)  # and leaves the global generator alone


def test_another_seed_gives_other_weights_everywhere():
    for (name, a), b in zip(model_of(0).named_parameters(), model_of(1).parameters(), strict=True):
        assert a.ndim == 1 or not torch.equal(a, b), name


def test_no_two_matrices_and_no_two_experts_are_equal():
    seen: list[torch.Tensor] = []
    for parameter in model_of().parameters():
        if parameter.ndim > 1:
            seen += [parameter] if parameter.ndim == 2 else list(parameter.unbind(0))
    heads = [matrix.flatten()[:16].tolist() for matrix in seen]
    assert len({tuple(head) for head in heads}) == len(seen) > 30


def test_weights_depend_on_the_name_and_not_on_the_other_layers():
    shallow, deep = model_of(num_layers=2).state_dict(), model_of(num_layers=5).state_dict()
    for name, value in shallow.items():
        assert torch.equal(value, deep[name]), name


@pytest.mark.parametrize(("first", "count"), [(0, 2), (2, 2), (4, 2), (3, 3), (5, 1)])
def test_a_slice_of_the_experts_is_drawn_as_in_the_whole_model(first, count):
    whole = model_of()
    part = Transformer(CONFIG)
    for block in part.blocks:
        if block.moe is not None:
            block.moe.experts = Experts(count, CONFIG.d_model, CONFIG.expert_hidden)
    init_weights(part, 0, CONFIG.init_std, first_expert=first)
    for name, value in whole.state_dict().items():
        expected = value[first : first + count] if ".experts." in name else value
        assert torch.equal(part.state_dict()[name], expected), name


def test_more_experts_leave_the_first_ones_as_they_were():
    few, many = model_of().state_dict(), model_of(num_experts=9).state_dict()
    name = "blocks.1.moe.experts.w_down"
    assert torch.equal(many[name][:6], few[name])


def test_a_model_built_on_the_meta_device_ends_up_the_same():
    """Moving off the meta device makes new parameters and buffers without contents."""
    with torch.device("meta"):
        model = Transformer(CONFIG)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(float("nan"))
    model.init_weights(0)
    assert_same_state(model, model_of())
    assert all(bias.dtype == torch.float32 and not bias.any() for bias in model.buffers())


def expert_names(model: nn.Module) -> set[str]:
    experts = set(expert_parameters(model))
    return {name for name, parameter in model.named_parameters() if parameter in experts}


def test_expert_parameters_are_found_after_copies_casts_and_the_meta_device():
    """Optimizer groups and sharding rely on it."""
    model = model_of()
    marked = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert len(marked) == 4
    with torch.device("meta"):
        empty = Transformer(CONFIG)
    for other in (model, copy.deepcopy(model), model.bfloat16(), empty.to_empty(device="cpu")):
        assert expert_names(other) == marked


@pytest.mark.parametrize(
    "changes", [{}, {"norm_placement": "post"}, {"tie_embeddings": True}, {"qk_norm": "none"}], ids=str
)
def test_every_parameter_and_buffer_is_written(changes):
    """Under this mode fresh memory holds NaN; so does the poison for what the mode does not reach."""
    torch.use_deterministic_algorithms(True)
    try:
        model = Transformer(CONFIG.replace(**changes))
    finally:
        torch.use_deterministic_algorithms(False)
    assert any(parameter.isnan().any() for parameter in model.parameters())  # negative control
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    model.init_weights(0)
    for name, value in model.state_dict().items():
        assert value.isfinite().all(), name


def test_matrices_are_a_normal_cut_at_three_sigma_and_vectors_are_one():
    model = model_of(vocab_size=2000)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.abs().max() <= 3 * CONFIG.init_std, name
            assert parameter.abs().max() > 2 * CONFIG.init_std, name
    sample = model.embed.weight.detach().flatten() / CONFIG.init_std
    # 32,000 draws: the mean errs by 1/179. A unit normal cut at 3 sigma has a standard deviation of 0.9866.
    assert sample.mean().abs() < 4 / 179
    assert (sample.std() - 0.9866).abs() < 0.02
    assert (sample.abs() > 2).float().mean() == pytest.approx(0.0430, abs=0.006)  # (0.0455 - 0.0027) / 0.9973


def test_a_16_bit_weight_is_the_rounded_fp32_draw():
    wide, narrow = torch.empty(5, 7), torch.empty(5, 7, dtype=torch.bfloat16)
    for weight in (wide, narrow):
        truncated_normal_(weight, 0.02, seeded_generator(0, "name"))
    assert torch.equal(narrow, wide.bfloat16())


def test_generators_of_different_keys_differ_and_of_equal_keys_agree():
    keys = [(0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1), (0, "a"), (11, "a"), (1, "1/a")]
    draws = [tuple(torch.rand(4, generator=seeded_generator(*key)).tolist()) for key in keys]
    assert len(set(draws)) == len(keys)
    assert draws[0] == tuple(torch.rand(4, generator=seeded_generator(0, "a", 1)).tolist())
