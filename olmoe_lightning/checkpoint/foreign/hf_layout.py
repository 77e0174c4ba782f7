"""Names and shapes of every weight: ours, Hugging Face OLMoE's, and which part of ours each of theirs is.

Both sides store matrices as [out, in], and every Hugging Face tensor is a run of rows of one of ours, so a conversion
never transposes and never computes: it only cuts and joins.

Letters: V vocabulary, D model width, L layers, E experts, H expert hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError

Shape = tuple[int, ...]


def native_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight (and kept buffer) of ``Transformer(config)``, in the order of the forward pass."""
    d = config.d_model
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab_size, d)}
    if config.embed_norm:
        shapes["embed_norm.weight"] = (d,)
    for layer in range(config.num_layers):
        block = f"blocks.{layer}."
        norms = {"pre": ("norm",), "post": ("post_norm",), "peri": ("norm", "post_norm")}[config.norm_placement]
        shapes |= {f"{block}attn_{norm}.weight": (d,) for norm in norms}
        shapes[f"{block}attn.qkv.weight"] = (config.attention_dim + 2 * config.kv_dim, d)
        if config.qk_norm != "none":
            flat = config.qk_norm == "flat"
            shapes[f"{block}attn.q_norm.weight"] = (config.attention_dim if flat else config.head_dim,)
            shapes[f"{block}attn.k_norm.weight"] = (config.kv_dim if flat else config.head_dim,)
        shapes[f"{block}attn.out.weight"] = (d, config.attention_dim)
        shapes |= {f"{block}ffn_{norm}.weight": (d,) for norm in norms}
        if layer < config.num_dense_layers:
            shapes[f"{block}mlp.w_gate_up.weight"] = (2 * config.dense_hidden, d)
            shapes[f"{block}mlp.w_down.weight"] = (d, config.dense_hidden)
            continue
        shapes[f"{block}moe.router.weight"] = (config.num_experts, d)
        if config.selection_bias:
            shapes[f"{block}moe.router.selection_bias"] = (config.num_experts,)
        shapes[f"{block}moe.experts.w_gate_up"] = (config.num_experts, 2 * config.expert_hidden, d)
        shapes[f"{block}moe.experts.w_down"] = (config.num_experts, d, config.expert_hidden)
        if config.shared_hidden:
            shapes[f"{block}moe.shared.w_gate_up.weight"] = (2 * config.shared_hidden, d)
            shapes[f"{block}moe.shared.w_down.weight"] = (d, config.shared_hidden)
    shapes["norm.weight"] = (d,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, d)
    return shapes


def stays_fp32(name: str) -> bool:
    """Whether a tensor of ours keeps its type when weights are cast: the selection bias, whose steps are tiny."""
    return name.endswith("selection_bias")


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a saved Hugging Face OLMoE checkpoint, and where it lies in ours.

    Attributes:
        name: its key in the safetensors files.
        shape: its shape there.
        native: the tensor of ours that holds it.
        index: the part of ours, one slice per leading dimension; it has ``shape`` up to a leading 1.
    """

    name: str
    shape: Shape
    native: str
    index: tuple[slice, ...] = ()


def hf_tensors(config: ModelConfig) -> dict[str, list[HFTensor]]:
    """The Hugging Face tensors that make up each of ours, in the order in which they are joined.

    Experts stand in numeric order (10 after 9), the gate's rows before the up projection's.

    Args:
        config: one that Hugging Face OLMoE can express (``hf_config.inexpressible`` is empty).
    """
    parts: dict[str, list[HFTensor]] = {}
    for native, shape in native_shapes(config).items():
        prefix, layer, rest = _split(native)
        if rest in _SAME:
            parts[native] = [HFTensor(prefix + _SAME[rest], shape, native)]
            continue
        parts[native] = []
        if rest == "attn.qkv.weight":
            start = 0
            for letter, rows in zip("qkv", (config.attention_dim, config.kv_dim, config.kv_dim), strict=True):
                name = f"{prefix}self_attn.{letter}_proj.weight"
                parts[native].append(HFTensor(name, (rows, shape[1]), native, (slice(start, start + rows),)))
                start += rows
            continue
        h, d = config.expert_hidden, config.d_model
        for e in range(config.num_experts):
            expert, this = f"{prefix}mlp.experts.{e}.", slice(e, e + 1)
            if rest == "moe.experts.w_gate_up":
                parts[native] += [
                    HFTensor(f"{expert}gate_proj.weight", (h, d), native, (this, slice(0, h))),
                    HFTensor(f"{expert}up_proj.weight", (h, d), native, (this, slice(h, 2 * h))),
                ]
            elif rest == "moe.experts.w_down":
                parts[native].append(HFTensor(f"{expert}down_proj.weight", (d, h), native, (this,)))
            else:
                raise UserError(f"{native} has no place in a Hugging Face OLMoE checkpoint (layer {layer})")
    return parts


def hf_fused_name(native: str) -> str | None:
    """The key under which transformers 5 holds all experts of a layer in one tensor, in our layout; None for others."""
    prefix, _, rest = _split(native)
    return {
        "moe.experts.w_gate_up": f"{prefix}mlp.experts.gate_up_proj",
        "moe.experts.w_down": f"{prefix}mlp.experts.down_proj",
    }.get(rest)


def _split(native: str) -> tuple[str, str, str]:
    """Splits ``blocks.3.attn.out.weight`` into the Hugging Face prefix, the layer and the rest of our name."""
    if not native.startswith("blocks."):
        return "", "", native
    _, layer, rest = native.split(".", 2)
    return f"model.layers.{layer}.", layer, rest


_SAME = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.out.weight": "self_attn.o_proj.weight",
    "moe.router.weight": "mlp.gate.weight",
}
