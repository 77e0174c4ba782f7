"""The model's configuration: one frozen dataclass, its validation, its counts of parameters and FLOPs, the presets.

Letters: V vocabulary, D model width, L layers, E experts, K experts chosen per token, H expert hidden width.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from olmoe_lightning.errors import UserError

NormPlacement = Literal["pre", "post", "peri"]
QKNorm = Literal["none", "flat", "head"]
ScoreFunction = Literal["softmax", "sigmoid", "topk_softmax"]
RouterMode = Literal["learned", "uniform", "random"]
BalanceScope = Literal["microbatch", "sequence"]
Recompute = Literal["none", "block", "experts"]


@dataclass(frozen=True)
class ModelConfig:
    """Everything that defines the network, validated on construction.

    The defaults describe an OLMoE-like block (pre-norm, QK-norm over the flat projection, no renormalisation of the
    router's weights); the Olmo-core 3 family is the same network with other options. :meth:`preset` has the named ones.

    Args:
        vocab_size: rows of the embedding and of the head.
        d_model: width of the residual stream.
        num_layers: number of blocks, dense ones included.
        num_heads: query heads.
        num_kv_heads: key/value heads; must divide ``num_heads`` (grouped-query attention when smaller).
        head_dim: width of a head; ``num_heads * head_dim`` may differ from ``d_model``.
        num_experts: routed experts per MoE block.
        top_k: experts chosen per token.
        expert_hidden: hidden width of one routed expert.
        shared_hidden: hidden width of the shared expert that every token passes; 0 for none.
        num_dense_layers: leading blocks with a dense feed-forward instead of experts.
        dense_hidden: hidden width of those dense blocks.
        max_seq_len: longest sequence the model is meant for (generation stops there).
        norm_placement: ``pre`` normalises a branch's input, ``post`` (Olmo's reordered norm) its output, ``peri`` both.
        norm_eps: epsilon of every RMSNorm.
        qk_norm: RMSNorm of queries and keys: ``flat`` over the whole projection (OLMoE), ``head`` over each head.
        clip_qkv: clamp queries, keys and values to this magnitude; ``None`` for no clamp.
        rope_theta: base of the rotary position embedding.
        embed_norm: RMSNorm after the embedding.
        embed_scale: multiply the embedding by the square root of ``d_model``.
        tie_embeddings: share the embedding's weight with the head.
        score_function: ``softmax`` or ``sigmoid`` over all experts, or ``topk_softmax`` over the chosen ones.
        normalize_weights: divide the K chosen weights by their sum (L1).
        restore_weight_scale: multiply them by K afterwards.
        expert_weight_scale: constant factor on the weights.
        num_groups: experts are split into so many groups for group-limited choice; 1 for none.
        top_k_groups: groups that stay eligible per token.
        router_mode: ``learned``; or ``uniform`` / ``random`` forced assignments for benchmarks.
        router_jitter: multiply the router's input by U(1-j, 1+j) in training.
        selection_bias: keep an fp32 bias per expert that shifts the choice, never the weights.
        bias_update_rate: its step after each optimizer step, ``b += rate * sign(mean(load) - load)``; 0 freezes it.
        balance_loss_coeff: coefficient of the load-balance loss; exactly the loss at perfect balance.
        balance_loss_scope: tokens over which load and probability are averaged: the microbatch or each sequence.
        router_z_loss_coeff: coefficient of the router's z-loss.
        lm_z_loss_coeff: coefficient of the z-loss of the head's logits.
        init_std: standard deviation of the truncated normal (at 3 sigma) that initialises every weight matrix.
        recompute: what the backward pass recomputes instead of keeping: nothing, whole blocks, or only the experts.

    Raises:
        UserError: a field is out of range or two fields contradict each other; the message has both numbers.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_hidden: int
    shared_hidden: int = 0
    num_dense_layers: int = 0
    dense_hidden: int = 0
    max_seq_len: int = 4096
    norm_placement: NormPlacement = "pre"
    norm_eps: float = 1e-5
    qk_norm: QKNorm = "flat"
    clip_qkv: float | None = None
    rope_theta: float = 10_000.0
    embed_norm: bool = False
    embed_scale: bool = False
    tie_embeddings: bool = False
    score_function: ScoreFunction = "softmax"
    normalize_weights: bool = False
    restore_weight_scale: bool = False
    expert_weight_scale: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    router_mode: RouterMode = "learned"
    router_jitter: float = 0.0
    selection_bias: bool = False
    bias_update_rate: float = 0.0
    balance_loss_coeff: float = 0.01
    balance_loss_scope: BalanceScope = "microbatch"
    router_z_loss_coeff: float = 0.001
    lm_z_loss_coeff: float = 0.0
    init_std: float = 0.02
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_seq_len"):
            _require(getattr(self, name) >= 1, f"{name} ({getattr(self, name)}) must be at least 1")
        for name in ("shared_hidden", "num_dense_layers", "dense_hidden"):
            _require(getattr(self, name) >= 0, f"{name} ({getattr(self, name)}) must not be negative")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, f"{name} ({value!r}) must be one of {', '.join(map(repr, choices))}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({self.num_kv_heads})",
        )
        _require(self.head_dim % 2 == 0, f"head_dim ({self.head_dim}) must be even for rotary positions")
        _require(
            self.num_dense_layers <= self.num_layers,
            f"num_dense_layers ({self.num_dense_layers}) must not exceed num_layers ({self.num_layers})",
        )
        if self.num_dense_layers:
            _require(
                self.dense_hidden >= 1,
                f"dense_hidden ({self.dense_hidden}) must be set when num_dense_layers ({self.num_dense_layers}) is",
            )
        if self.num_moe_layers:
            self._validate_routing()
        for name in (
            "balance_loss_coeff",
            "router_z_loss_coeff",
            "lm_z_loss_coeff",
            "router_jitter",
            "bias_update_rate",
        ):
            _require(getattr(self, name) >= 0, f"{name} ({getattr(self, name)}) must not be negative")
        for name in ("norm_eps", "rope_theta", "init_std", "expert_weight_scale"):
            _require(getattr(self, name) > 0, f"{name} ({getattr(self, name)}) must be positive")
        _require(
            self.clip_qkv is None or self.clip_qkv > 0,
            f"clip_qkv ({self.clip_qkv}) must be positive; use None for no clamp",
        )

    def _validate_routing(self) -> None:
        for name in ("num_experts", "top_k", "expert_hidden", "num_groups", "top_k_groups"):
            _require(getattr(self, name) >= 1, f"{name} ({getattr(self, name)}) must be at least 1")
        _require(
            self.top_k <= self.num_experts, f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})"
        )
        _require(
            self.num_experts % self.num_groups == 0,
            f"num_experts ({self.num_experts}) must be divisible by num_groups ({self.num_groups})",
        )
        _require(
            self.top_k_groups <= self.num_groups,
            f"top_k_groups ({self.top_k_groups}) must not exceed num_groups ({self.num_groups})",
        )
        eligible = self.num_experts // self.num_groups * self.top_k_groups
        _require(
            self.top_k <= eligible,
            f"top_k ({self.top_k}) must not exceed the {eligible} experts in top_k_groups ({self.top_k_groups}) "
            f"of num_groups ({self.num_groups})",
        )
        _require(self.router_jitter < 1, f"router_jitter ({self.router_jitter}) must be below 1")
        _require(
            self.bias_update_rate == 0 or self.selection_bias,
            f"bias_update_rate ({self.bias_update_rate}) needs selection_bias=True",
        )

    @property
    def num_moe_layers(self) -> int:
        """Blocks that have routed experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def attention_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Parameters of the whole model. Derived from the configuration alone; a test counts the built model."""
        return self._count_params(self.num_experts)

    @property
    def num_active_params(self) -> int:
        """Parameters a token meets: all but the experts it was not sent to (embedding, head and router in full)."""
        return self._count_params(self.top_k)

    def _count_params(self, experts: int) -> int:
        d = self.d_model
        attention = 2 * d * self.attention_dim + 2 * d * self.kv_dim
        qk_norm = {"none": 0, "flat": self.attention_dim + self.kv_dim, "head": 2 * self.head_dim}[self.qk_norm]
        norms = (4 if self.norm_placement == "peri" else 2) * d
        moe = self.num_experts * d + 3 * d * (experts * self.expert_hidden + self.shared_hidden)
        outside = self.vocab_size * d * (1 if self.tie_embeddings else 2) + d * (2 if self.embed_norm else 1)
        return (
            outside
            + self.num_layers * (attention + qk_norm + norms)
            + self.num_dense_layers * 3 * d * self.dense_hidden
            + self.num_moe_layers * moe
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of one trained token: forward and backward, causal attention counted at half, no recompute.

        The formula is the one that the Olmo-core 3 benchmarks print; a multiply-add counts as two.

        Args:
            seq_len: tokens of a training sequence (attention's share grows with it).
        """
        return sum(self.flops_per_layer(seq_len)) + self.flops_of_head

    def flops_per_layer(self, seq_len: int) -> tuple[float, ...]:
        """The share of each block, in order, in :meth:`flops_per_token`; dense blocks and MoE blocks differ.

        Args:
            seq_len: tokens of a training sequence.
        """
        d = self.d_model
        attention = 6 * (2 * d * self.attention_dim + 2 * d * self.kv_dim) + 12 * self.attention_dim * (seq_len + 1) / 2
        dense = 18 * d * self.dense_hidden
        moe = 6 * d * self.num_experts + 18 * d * (self.top_k * self.expert_hidden + self.shared_hidden)
        return (attention + dense,) * self.num_dense_layers + (attention + moe,) * self.num_moe_layers

    @property
    def flops_of_head(self) -> float:
        """The share of the head in :meth:`flops_per_token`."""
        return 6.0 * self.d_model * self.vocab_size

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, validated again.

        Raises:
            UserError: a name is not a field, or the result is invalid.
        """
        fields = [field.name for field in dataclasses.fields(self)]
        _require_known(changes, fields)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, as checkpoints and manifests keep them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            UserError: a key is not a field, a field without default is missing, or the result is invalid.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        _require_known(values, list(fields))
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
        _require(not missing, f"ModelConfig lacks {', '.join(missing)}")
        return cls(**values)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ModelConfig:
        """A named configuration, see :data:`PRESETS`.

        Args:
            name: for example ``tiny``, ``olmoe-1b-7b``, ``tiny-64e``, ``ultra-256e``, ``bench-8l-64e``.
            overrides: fields to change.

        Raises:
            UserError: no preset has that name (the message lists them), or an override is invalid.
        """
        if name not in PRESETS:
            raise UserError(
                f"unknown preset {name!r}{_suggest(name, list(PRESETS))}; the presets are {', '.join(PRESETS)}"
            )
        config = PRESETS[name]
        return config.replace(**overrides) if overrides else config


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _require_known(names: Iterable[str], fields: list[str]) -> None:
    for name in names:
        if name not in fields:  # a suggestion takes long to look for
            raise UserError(f"{name!r} is not a field of ModelConfig{_suggest(name, fields)}")


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


_CHOICES: dict[str, tuple[str, ...]] = {
    "norm_placement": ("pre", "post", "peri"),
    "qk_norm": ("none", "flat", "head"),
    "score_function": ("softmax", "sigmoid", "topk_softmax"),
    "router_mode": ("learned", "uniform", "random"),
    "balance_loss_scope": ("microbatch", "sequence"),
    "recompute": ("none", "block", "experts"),
}


def _olmo3(
    d_model: int,
    num_layers: int,
    num_dense_layers: int,
    num_heads: int,
    num_kv_heads: int,
    hidden: int,
    num_experts: int,
    norm_placement: NormPlacement = "peri",
    balance_loss_coeff: float = 0.005,
    router_z_loss_coeff: float = 2e-4,
) -> ModelConfig:
    """One size of the Olmo-core 3 family: top-4 plus a shared expert as wide as a routed one."""
    top_k = 4
    return ModelConfig(
        vocab_size=100_352,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        num_experts=num_experts,
        top_k=top_k,
        expert_hidden=hidden,
        shared_hidden=hidden,
        num_dense_layers=num_dense_layers,
        dense_hidden=(top_k + 1) * hidden,
        max_seq_len=8192,
        norm_placement=norm_placement,
        norm_eps=1e-6,
        qk_norm="head",
        rope_theta=500_000.0,
        embed_norm=True,
        embed_scale=True,
        normalize_weights=True,
        restore_weight_scale=True,
        balance_loss_coeff=balance_loss_coeff,
        router_z_loss_coeff=router_z_loss_coeff,
        lm_z_loss_coeff=1e-4,
        init_std=0.01,
    )


def _bench_8l(num_experts: int) -> ModelConfig:
    return _olmo3(4096, 8, 1, 32, 8, 4096, num_experts, "post", balance_loss_coeff=0.015, router_z_loss_coeff=1e-4)


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=2048,
        d_model=192,
        num_layers=4,
        num_heads=6,
        num_kv_heads=3,
        head_dim=32,
        num_experts=16,
        top_k=2,
        expert_hidden=192,
        max_seq_len=1024,
        qk_norm="head",
        normalize_weights=True,
    ),
    "olmoe-1b-7b": ModelConfig(
        vocab_size=50_304,
        d_model=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        num_experts=64,
        top_k=8,
        expert_hidden=1024,
        max_seq_len=4096,
        norm_eps=1e-5,
        qk_norm="flat",
        rope_theta=10_000.0,
    ),
    "tiny-64e": _olmo3(2048, 16, 1, 16, 4, 2048, 64, balance_loss_coeff=0.01),
    "small-64e": _olmo3(2560, 32, 1, 24, 6, 2560, 64),
    "medium-64e": _olmo3(3072, 39, 2, 32, 8, 3072, 64),
    "medium-96e": _olmo3(3072, 39, 2, 32, 8, 3072, 96),
    "medium-128e": _olmo3(3072, 39, 2, 32, 8, 3072, 128),
    "large-128e": _olmo3(4096, 47, 2, 40, 10, 4096, 128),
    "ultra-128e": _olmo3(6144, 63, 2, 64, 32, 8192, 128),
    "ultra-256e": _olmo3(6144, 63, 2, 64, 32, 8192, 256),
    "bench-8l-8e": _bench_8l(8),
    "bench-8l-32e": _bench_8l(32),
    "bench-8l-48e": _bench_8l(48),
    "bench-8l-64e": _bench_8l(64),
    "bench-8l-128e": _bench_8l(128),
}
"""Named configurations; OLMoE-1B-7B and the Olmo-core 3 family have exactly the published parameter counts."""
