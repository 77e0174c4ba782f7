"""Hugging Face's ``config.json`` of OLMoE to and from :class:`ModelConfig`: plain dictionaries, no transformers."""

from __future__ import annotations

import dataclasses
from typing import Any

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError

TOKEN_IDS: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": 50_279, "pad_token_id": 1}
"""Special tokens that we carry along, with the values that a Hugging Face configuration means when it lacks them."""

TRAINING_FIELDS = (
    "max_seq_len",
    "router_mode",
    "router_jitter",
    "bias_update_rate",
    "balance_loss_coeff",
    "balance_loss_scope",
    "router_z_loss_coeff",
    "lm_z_loss_coeff",
    "init_std",
    "recompute",
)
"""Fields of :class:`ModelConfig` that change how a model is trained, not what its weights compute."""

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "intermediate_size": "expert_hidden",
}
_OPTIONS = {  # Hugging Face name: (ours, the value it means when left out)
    "max_position_embeddings": ("max_seq_len", 4096),
    "rms_norm_eps": ("norm_eps", 1e-5),
    "clip_qkv": ("clip_qkv", None),
    "tie_word_embeddings": ("tie_embeddings", False),
    "norm_topk_prob": ("normalize_weights", False),
    "router_aux_loss_coef": ("balance_loss_coeff", 0.01),
    "initializer_range": ("init_std", 0.02),
}


def config_from_hf(values: dict[str, Any]) -> ModelConfig:
    """Reads a Hugging Face OLMoE configuration.

    Understands both spellings of the rotary base: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``
    (transformers 5). ``router_aux_loss_coef`` becomes ``balance_loss_coeff`` with the same number; for one layer
    Hugging Face's loss is ``top_k`` times ours.

    Args:
        values: the content of ``config.json``.

    Raises:
        UserError: it is not an OLMoE, a size is missing, or it uses something that this model does not have. One
            error lists everything that was found.
    """
    model_type = values.get("model_type")
    if model_type != "olmoe":
        raise UserError(f"model_type is {model_type!r}; only 'olmoe' can be read")
    problems = [f"{name} is missing" for name in _SIZES if not isinstance(values.get(name), int)]
    problems += _unsupported(values)
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        problems.append(f"rope_type is {rope_type!r}; only 'default' (no scaling) is supported")
    if problems:
        raise _listed("this Hugging Face configuration cannot be read", problems)
    fields = {ours: values[theirs] for theirs, ours in _SIZES.items()}
    fields |= {ours: values.get(theirs, default) for theirs, (ours, default) in _OPTIONS.items()}
    heads = fields["num_heads"]
    return ModelConfig(
        **fields,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=fields["d_model"] // heads,
        rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 10_000.0))),
        norm_placement="pre",
        qk_norm="flat",
        score_function="softmax",
    )


def _unsupported(values: dict[str, Any]) -> list[str]:
    problems = []
    if values.get("attention_bias"):
        problems.append("attention_bias is true; projections here have no bias")
    if values.get("attention_dropout"):
        problems.append(f"attention_dropout is {values['attention_dropout']}; only 0 is supported")
    if values.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {values['hidden_act']!r}; only 'silu' is supported")
    if values.get("quantization_config"):
        problems.append("quantization_config is set; dequantise the checkpoint first")
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int):
        if width % heads:
            problems.append(f"hidden_size ({width}) is not divisible by num_attention_heads ({heads})")
        elif values.get("head_dim") not in (None, width // heads):
            problems.append(
                f"head_dim ({values['head_dim']}) is not hidden_size / num_attention_heads ({width // heads})"
            )
    return problems


def config_to_hf(
    config: ModelConfig, dtype: str | None = None, token_ids: dict[str, int | None] | None = None
) -> dict[str, Any]:
    """The ``config.json`` that ``OlmoeForCausalLM.from_pretrained`` reads.

    Args:
        config: the model; fields in :data:`TRAINING_FIELDS` without a counterpart are left out.
        dtype: name of the weights' type, for example ``bfloat16``.
        token_ids: values of :data:`TOKEN_IDS`. Those left out are written as null, because Hugging Face would put
            OLMoE's own in their place.

    Raises:
        UserError: the configuration uses features that Hugging Face OLMoE cannot express; all are listed.
    """
    if problems := inexpressible(config):
        raise _listed("Hugging Face OLMoE cannot express this model", problems)
    values: dict[str, Any] = {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}
    values |= {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}
    values |= {theirs: getattr(config, ours) for theirs, (ours, _) in _OPTIONS.items()}
    values |= {
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        # Both spellings, so that transformers 4 and 5 read the same base.
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "output_router_logits": False,
        "use_cache": True,
    }
    values |= {name: (token_ids or {}).get(name) for name in TOKEN_IDS}
    if dtype is not None:
        values["torch_dtype"] = dtype
    return dict(sorted(values.items()))


def inexpressible(config: ModelConfig) -> list[str]:
    """What of a configuration changes the model's function in a way that Hugging Face OLMoE has no field for."""
    c = config
    found = {
        f"shared_hidden={c.shared_hidden} (a shared expert)": c.shared_hidden > 0,
        f"num_dense_layers={c.num_dense_layers} (dense blocks)": c.num_dense_layers > 0,
        f"norm_placement={c.norm_placement!r} (only 'pre')": c.norm_placement != "pre",
        f"qk_norm={c.qk_norm!r} (only 'flat')": c.qk_norm != "flat",
        f"num_heads * head_dim = {c.attention_dim} (only d_model, {c.d_model})": c.attention_dim != c.d_model,
        "embed_norm=True": c.embed_norm,
        "embed_scale=True": c.embed_scale,
        "score_function='sigmoid' (only 'softmax')": c.score_function == "sigmoid",
        "score_function='topk_softmax' (equal to 'softmax' with normalize_weights=True)": c.score_function
        == "topk_softmax",
        "restore_weight_scale=True": c.restore_weight_scale,
        f"expert_weight_scale={c.expert_weight_scale} (only 1)": c.expert_weight_scale != 1,
        f"top_k_groups={c.top_k_groups} of num_groups={c.num_groups} (group-limited choice)": c.top_k_groups
        < c.num_groups,
        f"router_mode={c.router_mode!r} (only 'learned')": c.router_mode != "learned",
        "selection_bias=True": c.selection_bias,
    }
    return [text for text, present in found.items() if present]


def functional_differences(wanted: ModelConfig, found: ModelConfig) -> list[str]:
    """Fields outside :data:`TRAINING_FIELDS` in which two configurations differ, as readable text."""
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in TRAINING_FIELDS]
    return [
        f"{name}: the model has {getattr(wanted, name)!r}, the checkpoint {getattr(found, name)!r}"
        for name in names
        if getattr(wanted, name) != getattr(found, name)
    ]


def _listed(head: str, problems: list[str]) -> UserError:
    return UserError(head + ":\n" + "\n".join(f"  - {problem}" for problem in problems))
