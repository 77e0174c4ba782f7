"""Hugging Face's config.json and ModelConfig: equal meaning both ways, and one complete error where there is none."""

import json
import re
from pathlib import Path

import pytest
from transformers import OlmoeConfig

from olmoe_lightning.checkpoint.foreign import hf_config
from olmoe_lightning.checkpoint.foreign.hf_config import (
    config_from_hf,
    config_to_hf,
    functional_differences,
    inexpressible,
)
from olmoe_lightning.config import PRESETS, ModelConfig

# The released OLMoE-1B-7B-0924, as transformers 4 wrote it.
RELEASED = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 50304,
}

UNUSUAL = ModelConfig.preset(
    "olmoe-1b-7b",
    num_kv_heads=4,
    clip_qkv=8.0,
    normalize_weights=True,
    tie_embeddings=True,
    rope_theta=500_000.0,
    norm_eps=1e-6,
    max_seq_len=8192,
    balance_loss_coeff=0.02,
    init_std=0.01,
)


def test_released_configuration_is_the_preset():
    assert config_from_hf(RELEASED) == PRESETS["olmoe-1b-7b"]


@pytest.mark.parametrize("config", [PRESETS["olmoe-1b-7b"], UNUSUAL], ids=["released", "unusual"])
def test_configuration_survives_the_way_out_and_in(config):
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("config", [PRESETS["olmoe-1b-7b"], UNUSUAL], ids=["released", "unusual"])
def test_transformers_reads_what_is_exported_and_its_own_file_reads_back(config, tmp_path):
    exported = config_to_hf(config, dtype="bfloat16", token_ids={"eos_token_id": 7})
    (tmp_path / "config.json").write_text(json.dumps(exported))
    theirs = OlmoeConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.num_key_value_heads == config.num_kv_heads
    assert theirs.tie_word_embeddings == config.tie_embeddings
    assert theirs.eos_token_id == 7
    assert theirs.pad_token_id is None  # OLMoE's own default, 1, would freeze the embedding of token 1
    assert str(theirs.dtype) == "torch.bfloat16"
    theirs.save_pretrained(tmp_path / "again")
    assert config_from_hf(json.loads((tmp_path / "again" / "config.json").read_text())) == config


def test_both_spellings_of_the_rotary_base_are_read():
    new = {k: v for k, v in RELEASED.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500_000.0}
    assert config_from_hf(new).rope_theta == 500_000.0
    assert config_from_hf(RELEASED | {"rope_theta": 250_000.0}).rope_theta == 250_000.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"head_dim": 64}, r"head_dim \(64\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"model_type": "mixtral"}, "'mixtral'"),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(RELEASED | change)


def test_one_error_lists_all_that_cannot_be_read():
    with pytest.raises(ValueError) as error:
        config_from_hf(RELEASED | {"attention_bias": True, "hidden_act": "gelu", "vocab_size": None})
    for text in ("attention_bias", "hidden_act", "vocab_size"):
        assert text in str(error.value)


def test_one_error_lists_all_that_cannot_be_expressed():
    config = PRESETS["tiny-64e"].replace(num_dense_layers=1, num_groups=4, top_k_groups=2, selection_bias=True)
    with pytest.raises(ValueError) as error:
        config_to_hf(config)
    for text in (
        "shared_hidden=2048",
        "num_dense_layers=1",
        "norm_placement='peri'",
        "qk_norm='head'",
        "embed_norm",
        "embed_scale",
        "restore_weight_scale",
        "top_k_groups=2 of num_groups=4",
        "selection_bias",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 64},
        {"score_function": "sigmoid"},
        {"score_function": "topk_softmax"},
        {"expert_weight_scale": 2.5},
        {"router_mode": "uniform"},
        {"shared_hidden": 8},
        {"embed_norm": True},
        {"norm_placement": "post"},
        {"qk_norm": "none"},
    ],
    ids=str,
)
def test_each_feature_alone_is_found_inexpressible(change):
    assert inexpressible(PRESETS["olmoe-1b-7b"]) == []
    assert len(inexpressible(PRESETS["olmoe-1b-7b"].replace(**change))) == 1


def test_only_fields_that_change_the_function_count_as_differences():
    base = PRESETS["olmoe-1b-7b"]
    assert functional_differences(base.replace(recompute="block", router_z_loss_coeff=0.0, max_seq_len=128), base) == []
    (difference,) = functional_differences(base.replace(rope_theta=5e5), base)
    assert "rope_theta: the model has 500000.0, the checkpoint 10000.0" in difference


def test_no_file_of_the_checkpoint_package_imports_transformers():
    files = list(Path(hf_config.__file__).parent.glob("*.py"))
    assert len(files) > 3
    for file in files:
        assert not re.search(r"^\s*(import|from) transformers", file.read_text(), re.MULTILINE), file
