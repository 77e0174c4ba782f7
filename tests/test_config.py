"""The configuration: published parameter and FLOP counts, the built model's counts, errors that name the numbers."""

import dataclasses
import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from olmoe_lightning.config import PRESETS, ModelConfig
from olmoe_lightning.kernels import reference_kernels
from olmoe_lightning.model.transformer import Transformer

PUBLISHED_PARAMS = {  # preset: (active, total)
    "olmoe-1b-7b": (1_282_017_280, 6_919_161_856),
    "tiny-64e": (1_587_552_256, 12_912_173_056),
    "small-64e": (4_294_095_872, 40_863_183_872),
    "medium-64e": (7_371_919_104, 70_223_564_544),
    "medium-96e": (7_375_556_352, 103_748_079_360),
    "medium-128e": (7_379_193_600, 137_272_594_176),
    "large-128e": (15_138_557_696, 295_989_153_536),
    "ultra-128e": (58_358_763_264, 1_200_484_519_680),
    "ultra-256e": (58_406_735_616, 2_379_501_014_784),
    "bench-8l-8e": (3_171_198_976, 4_580_485_120),
    "bench-8l-32e": (3_171_887_104, 13_036_890_112),
    "bench-8l-48e": (3_172_345_856, 18_674_493_440),
    "bench-8l-64e": (3_172_804_608, 24_312_096_768),
    "bench-8l-128e": (3_174_639_616, 46_862_510_080),
}

PUBLISHED_GFLOPS = {  # preset: printed GFLOP per token at sequence length 8192
    "tiny-64e": "9.90",
    "small-64e": "29.05",
    "medium-64e": "50.23",
    "medium-96e": "50.25",
    "medium-128e": "50.28",
    "large-128e": "100.2",
    "ultra-128e": "371.8",
    "ultra-256e": "372.1",
}

SMALL = ModelConfig(
    vocab_size=48,
    d_model=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=6,
    top_k=2,
    expert_hidden=10,
    shared_hidden=14,
    num_dense_layers=1,
    dense_hidden=20,
)


def test_every_preset_but_tiny_has_a_published_count():
    assert set(PRESETS) == set(PUBLISHED_PARAMS) | {"tiny"}


@pytest.mark.parametrize(("name", "counts"), PUBLISHED_PARAMS.items(), ids=PUBLISHED_PARAMS.keys())
def test_preset_parameter_counts_equal_the_published_integers(name, counts):
    config = ModelConfig.preset(name)
    assert (config.num_active_params, config.num_params) == counts


def built_counts(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the built model, and those without the experts that a token does not meet."""
    with torch.device("meta"):
        model = Transformer(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    routed = sum(
        block.moe.experts.w_gate_up.numel() + block.moe.experts.w_down.numel() for block in model.blocks if block.moe
    )
    idle = routed // config.num_experts * (config.num_experts - config.top_k)
    return total - idle, total


@pytest.mark.parametrize("name", PRESETS)
def test_the_built_model_has_the_configured_parameter_counts(name):
    config = ModelConfig.preset(name)
    assert built_counts(config) == (config.num_active_params, config.num_params)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": "none"},
        {"qk_norm": "flat"},
        {"qk_norm": "head"},
        {"norm_placement": "post"},
        {"norm_placement": "peri"},
        {"tie_embeddings": True},
        {"embed_norm": True},
        {"shared_hidden": 0},
        {"num_dense_layers": 0},
        {"num_dense_layers": 3},
        {"selection_bias": True},  # a buffer, not a parameter
        {"num_kv_heads": 4, "head_dim": 10},
    ],
    ids=str,
)
def test_the_built_model_has_the_configured_parameter_counts_under_every_option(changes):
    config = SMALL.replace(**changes)
    assert built_counts(config) == (config.num_active_params, config.num_params)


@pytest.mark.parametrize(("name", "printed"), PUBLISHED_GFLOPS.items(), ids=PUBLISHED_GFLOPS.keys())
def test_preset_flops_per_token_equal_the_published_figures(name, printed):
    digits = len(printed.split(".")[1])
    assert f"{ModelConfig.preset(name).flops_per_token(8192) / 1e9:.{digits}f}" == printed


def expert_product_flops(x_shape, w_shape, *_args, out_shape=None, **_kwargs) -> int:
    rows, width = x_shape
    return 2 * rows * width * w_shape[1]


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": True}, {"num_kv_heads": 4, "shared_hidden": 0}, {"num_dense_layers": 0, "top_k": 5}],
    ids=str,
)
def test_flops_per_token_equal_the_counted_matrix_products_of_the_built_model(changes):
    """The forward products are counted and taken three times.

    Backward, each product has two of the same size (to its input and to its weight; every input here needs a gradient,
    the embedding being trained), so a trained token costs three forwards. The attention core is counted apart: the
    counter sees the full S x S products, the model's share is the S (S + 1) / 2 pairs that causality leaves.
    """
    config = SMALL.replace(**changes)
    model = Transformer(config)
    model.init_weights(0)
    batch, seq = 2, 12
    mapping = {torch.ops.olmoe_lightning.grouped_mm: expert_product_flops}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    # The counter sees torch's own operations only, and the products of this attention backend only.
    with torch.no_grad(), reference_kernels(), counter, sdpa_kernel(SDPBackend.MATH):
        model.logits(model(torch.zeros(batch, seq, dtype=torch.int64))[0])
    core = config.num_layers * batch * 4 * seq * seq * config.attention_dim
    by_op = counter.get_flop_counts()["Global"]
    assert by_op[torch.ops.aten.bmm] == core  # nothing but the attention core is a batched product
    expected = 3 * (counter.get_total_flops() - core + core * (seq + 1) / (2 * seq))
    assert config.flops_per_token(seq) * batch * seq == expected


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, ["num_heads (4)", "num_kv_heads (3)"]),
        ({"head_dim": 7}, ["head_dim (7)", "even"]),
        ({"num_dense_layers": 4}, ["num_dense_layers (4)", "num_layers (3)"]),
        ({"dense_hidden": 0}, ["dense_hidden (0)", "num_dense_layers (1)"]),
        ({"top_k": 7}, ["top_k (7)", "num_experts (6)"]),
        ({"num_groups": 4}, ["num_experts (6)", "num_groups (4)"]),
        ({"num_groups": 3, "top_k_groups": 4}, ["top_k_groups (4)", "num_groups (3)"]),
        ({"num_groups": 3, "top_k": 3}, ["top_k (3)", "the 2 experts", "top_k_groups (1)", "num_groups (3)"]),
        ({"bias_update_rate": 0.1}, ["bias_update_rate (0.1)", "selection_bias"]),
        ({"router_jitter": 1.0}, ["router_jitter (1.0)", "below 1"]),
        ({"router_jitter": -0.1}, ["router_jitter (-0.1)"]),
        ({"vocab_size": 0}, ["vocab_size (0)", "at least 1"]),
        ({"num_experts": 0}, ["num_experts (0)", "at least 1"]),
        ({"shared_hidden": -1}, ["shared_hidden (-1)", "negative"]),
        ({"balance_loss_coeff": float("nan")}, ["balance_loss_coeff (nan)"]),
        ({"init_std": 0.0}, ["init_std (0.0)", "positive"]),
        ({"clip_qkv": 0.0}, ["clip_qkv (0.0)", "None"]),
        ({"score_function": "max"}, ["'max'", "'softmax'", "'sigmoid'", "'topk_softmax'"]),
        ({"norm_placement": "both"}, ["'both'", "'peri'"]),
    ],
    ids=str,
)
def test_contradictions_are_refused_with_the_offending_numbers(changes, parts):
    with pytest.raises(ValueError) as caught:
        SMALL.replace(**changes)
    for part in parts:
        assert part in str(caught.value)


def test_a_model_without_routed_experts_needs_no_routing_fields():
    assert SMALL.replace(num_dense_layers=3, num_experts=0, top_k=0, expert_hidden=0).num_moe_layers == 0


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.d_model = 32


def test_a_configuration_survives_json():
    for config in PRESETS.values():
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_and_missing_names_are_refused_by_name_with_a_suggestion():
    with pytest.raises(ValueError, match=r"'num_expert' is not a field.*did you mean 'num_experts'"):
        SMALL.replace(num_expert=4)
    with pytest.raises(ValueError, match=r"'num_expert' is not a field.*did you mean 'num_experts'"):
        ModelConfig.from_dict(SMALL.to_dict() | {"num_expert": 4})
    values = SMALL.to_dict()
    del values["top_k"], values["d_model"]
    with pytest.raises(ValueError, match="lacks d_model, top_k"):
        ModelConfig.from_dict(values)
    with pytest.raises(ValueError, match=r"unknown preset 'olmoe-1b'.*did you mean 'olmoe-1b-7b'.*ultra-256e"):
        ModelConfig.preset("olmoe-1b")


def test_preset_overrides_are_applied_and_validated():
    assert ModelConfig.preset("tiny", num_experts=32).num_experts == 32
    assert ModelConfig.preset("tiny").num_experts != 32
    with pytest.raises(ValueError, match=r"top_k \(99\)"):
        ModelConfig.preset("tiny", top_k=99)
