"""The transformer of one process: the layers and experts that it holds, built without memory for any others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from olmoe_lightning.checkpoint import load_pretrained
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError
from olmoe_lightning.model import Transformer
from olmoe_lightning.parallel.pipeline.stages import StageMap


def build_network(
    config: ModelConfig,
    seed: int,
    pretrained: str | None,
    device: torch.device,
    place_experts: Callable[[Transformer], int],
    stages: StageMap | None,
    pipeline_rank: int,
) -> Transformer:
    """The part of this process of a distributed model, with its initial or pretrained weights.

    Args:
        config: of the whole model.
        seed: of the initial weights.
        pretrained: a checkpoint to start from, of which only the own part is read.
        device: of the weights.
        place_experts: keeps the own experts, and gives the global index of the first one.
        stages: which layers are where; ``None`` without a pipeline.
        pipeline_rank: of this process.

    Raises:
        UserError: the embedding is tied to a head that is in another process, or the checkpoint does not fit.
    """
    with torch.device("meta"):
        if stages is None:
            model = Transformer(config)
        else:
            first, last = _ends(config, stages, pipeline_rank)
            model = Transformer(config, stages.layers_of(pipeline_rank), first, last)
    first_expert = place_experts(model)
    model.to_empty(device=device)
    if pretrained is None:
        model.init_weights(seed, first_expert)
    else:
        load_pretrained(model, pretrained, first_expert, all_layers=stages is None)
    return model


def keep_own_layers(model: Transformer, stages: StageMap | None, pipeline_rank: int) -> None:
    """Drop what belongs to other processes from a model that was built before, for one process or for as many stages.

    Args:
        model: with at least the layers of this process.
        stages: which layers are where; ``None`` without a pipeline.
        pipeline_rank: of this process.

    Raises:
        UserError: it lacks some of them.
    """
    config, here = model.config, model.blocks.layers
    if stages is None:
        own, first, last = tuple(range(config.num_layers)), True, True
    else:
        own, (first, last) = stages.layers_of(pipeline_rank), _ends(config, stages, pipeline_rank)
    missing = [f"layer {layer}" for layer in own if layer not in here]
    missing += ["the embedding"] if first and model.embed is None else []
    missing += ["the head"] if last and model.norm is None else []
    if missing:
        raise UserError(
            f"this process needs {', '.join(missing)}, but its model has the layers {here} of an earlier run with "
            "another pipeline; make a new module, and give it the weights with ckpt_path or pretrained"
        )
    for layer in here:
        if layer not in own:
            delattr(model.blocks, str(layer))
    if not first and not (last and config.tie_embeddings):
        model.embed = model.embed_norm = None
    if not last:
        model.norm = model.head = None


def _ends(config: ModelConfig, stages: StageMap, pipeline_rank: int) -> tuple[bool, bool]:
    """Whether a process has the first and the last stage."""
    if config.tie_embeddings and stages.first_rank != stages.last_rank:
        raise UserError(
            "tied embeddings need the first and the last stage on one rank, but schedule "
            f"{stages.pipeline_schedule!r} has them on ranks {stages.first_rank} and {stages.last_rank}; "
            "set tie_embeddings=False, or take zbv_zero_bubble or dualpipev"
        )
    return pipeline_rank == stages.first_rank, pipeline_rank == stages.last_rank
