"""Sparse upcycling: a dense model as a mixture of experts that are copies of its MLPs, and computes the same at first.

After Komatsuzaki et al. 2023 (arXiv 2212.05055). E experts, K chosen ones, H hidden width, D model width. Every expert
f_e of a layer is the dense MLP f, so the mixture is sum_k w_k f_k(x) = f(x) sum_k w_k, and equals f(x) whatever the
router chooses if its K weights sum to one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from olmoe_lightning.checkpoint.foreign.hf_config import TRAINING_FIELDS
from olmoe_lightning.checkpoint.foreign.hf_layout import native_shapes
from olmoe_lightning.checkpoint.foreign.safetensors_dir import TensorInfo
from olmoe_lightning.checkpoint.foreign.sources import Source, TensorStore
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError
from olmoe_lightning.model.init import seeded_generator, truncated_normal_

_ROUTING: dict[str, Any] = {
    "shared_hidden": 0,
    "score_function": "softmax",
    "normalize_weights": True,
    "restore_weight_scale": False,
    "expert_weight_scale": 1.0,
    "num_groups": 1,
    "top_k_groups": 1,
    "selection_bias": False,
    "bias_update_rate": 0.0,
}
"""Fields that mean nothing in a dense model, and what they become."""


def upcycled(
    source: Source,
    num_experts: int,
    top_k: int,
    seed: int = 0,
    dense_layers: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Source:
    """The mixture that a dense model becomes; it is read block by block, like the dense one.

    Args:
        source: a model of ours whose layers are all dense.
        num_experts: E of each layer, each a copy of the layer's MLP (gate, up and down projection).
        top_k: K.
        seed: of the routers, which get the small initial weights that a new model of that seed has. They differ from
            expert to expert, so that equal experts get different tokens and grow apart.
        dense_layers: leading layers that stay as they are.
        overrides: further fields of the new configuration: those of the router, and those that only concern training.

    Raises:
        UserError: the source has experts already, or the mixture would not compute what the dense model does.
    """
    dense = source.config
    if dense.num_dense_layers < dense.num_layers:
        raise UserError(
            f"upcycling makes experts of dense layers, but {dense.num_moe_layers} of the model's {dense.num_layers} "
            "layers have experts already"
        )
    if not 0 <= dense_layers < dense.num_layers:
        raise UserError(
            f"dense_layers ({dense_layers}) must be between 0 and {dense.num_layers - 1}: one layer of "
            f"{dense.num_layers} at least gets experts"
        )
    changes: dict[str, Any] = {
        "num_experts": num_experts,
        "top_k": top_k,
        "expert_hidden": dense.dense_hidden,
        "num_dense_layers": dense_layers,
        "dense_hidden": dense.dense_hidden if dense_layers else 0,
        **_ROUTING,
    }
    allowed = {"expert_hidden", *_ROUTING, *TRAINING_FIELDS}
    if wrong := sorted(set(overrides or {}) - allowed):
        raise UserError(
            f"{', '.join(wrong)} cannot be changed by upcycling; overrides may have {', '.join(sorted(allowed))}"
        )
    config = dense.replace(**(changes | dict(overrides or {})))
    if problems := obstacles(config, dense.dense_hidden):
        raise UserError("the mixture would not compute what the dense model does: " + "; ".join(problems))
    hyper_parameters = source.hyper_parameters
    if hyper_parameters is not None:
        hyper_parameters = {**hyper_parameters, "config": config.to_dict()}
    return dataclasses.replace(
        source, config=config, store=_Upcycled(source.store, config, seed), hyper_parameters=hyper_parameters
    )


def obstacles(config: ModelConfig, dense_hidden: int) -> list[str]:
    """Why a mixture of copies of an MLP with hidden width ``dense_hidden`` would not equal it; empty if it would."""
    c = config
    found = []
    if c.expert_hidden != dense_hidden:
        found.append(f"an expert's width, expert_hidden ({c.expert_hidden}), is not the MLP's ({dense_hidden})")
    if c.shared_hidden:
        found.append(f"a shared expert (shared_hidden={c.shared_hidden}) adds to what the experts compute")
    sums_to_one = (
        c.normalize_weights
        or c.score_function == "topk_softmax"
        or (c.score_function == "softmax" and c.top_k == c.num_experts)
    )
    if not sums_to_one:
        found.append(
            f"the weights of {c.top_k} of {c.num_experts} experts do not sum to one with score_function="
            f"{c.score_function!r} and normalize_weights=False"
        )
    scale = c.expert_weight_scale * (c.top_k if c.restore_weight_scale else 1)
    if not math.isclose(scale, 1.0, rel_tol=1e-7):
        found.append(
            f"the weights are multiplied by {scale:g} (expert_weight_scale={c.expert_weight_scale}, "
            f"restore_weight_scale={c.restore_weight_scale}, top_k={c.top_k})"
        )
    return found


class _Upcycled:
    """The tensors of the mixture; those of experts are parts of the dense model's, read again for each expert."""

    def __init__(self, dense: TensorStore, config: ModelConfig, seed: int) -> None:
        self._dense, self._config, self._seed = dense, config, seed
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape in native_shapes(config).items():
            if name.endswith("selection_bias"):
                self.tensors[name] = TensorInfo.of(torch.empty(shape, dtype=torch.float32, device="meta"))
            else:
                self.tensors[name] = dataclasses.replace(dense.tensors[_origin(name)], shape=shape)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A part of a tensor, on the CPU; it may share memory with others."""
        shape, dtype = self.tensors[name].shape, self.tensors[name].dtype
        if ".moe.experts." in name:
            experts = len(range(*(index or (slice(None),))[0].indices(shape[0])))
            part = self._dense.read(_origin(name), index[1:])
            return part.unsqueeze(0).expand(experts, *part.shape)
        if name.endswith("router.weight"):
            weight = torch.empty(shape, dtype=torch.float32)
            truncated_normal_(weight, self._config.init_std, seeded_generator(self._seed, name))
            return weight.to(dtype)[index or (slice(None),)]
        if name.endswith("selection_bias"):
            return torch.zeros(shape, dtype=dtype)[index or (slice(None),)]
        return self._dense.read(name, index)


def _origin(name: str) -> str:
    """The tensor of the dense model that one of the mixture has its values from; a router has only its type."""
    block, moe, rest = name.partition(".moe.")
    if not moe:
        return name
    return f"{block}.mlp.{'w_down' if rest == 'experts.w_down' else 'w_gate_up'}.weight"
