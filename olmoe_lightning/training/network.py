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
            first, last = pipeline_rank == stages.first_rank, pipeline_rank == stages.last_rank
            if config.tie_embeddings and stages.first_rank != stages.last_rank:
                raise UserError(
                    "tied embeddings need the first and the last stage on one rank, but schedule "
                    f"{stages.pipeline_schedule!r} has them on ranks {stages.first_rank} and {stages.last_rank}; "
                    "set tie_embeddings=False, or take zbv_zero_bubble or dualpipev"
                )
            model = Transformer(config, stages.layers_of(pipeline_rank), first, last)
    first_expert = place_experts(model)
    model.to_empty(device=device)
    if pretrained is None:
        model.init_weights(seed, first_expert)
    else:
        load_pretrained(model, pretrained, first_expert, all_layers=stages is None)
    return model
