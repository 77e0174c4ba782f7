"""OLMoE's part in a pipeline: which layers a process builds, the module of a stage, and what a batch comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError
from olmoe_lightning.model import RoutingStats, Transformer
from olmoe_lightning.model.losses import IGNORE_INDEX
from olmoe_lightning.model.stage import Stage
from olmoe_lightning.parallel.pipeline.runner import PipelineRunner, Sums
from olmoe_lightning.parallel.pipeline.stages import StageMap
from olmoe_lightning.training.metrics import LanguageModelMetrics


class StagedModel(LightningModule):
    """Implements :class:`~olmoe_lightning.training.pipeline.PipelineModule` for the transformer."""

    config: ModelConfig
    metrics: LanguageModelMetrics
    _stage_map: StageMap | None
    """Of a pipeline, once the network is built for it."""

    built: Callable[[], Transformer]
    """The network, or the layers of this process; a method of the module."""

    def _own_layers(self, pipeline_rank: int) -> Transformer:
        if self._stage_map is None:
            return Transformer(self.config)
        first, last = pipeline_rank == self._stage_map.first_rank, pipeline_rank == self._stage_map.last_rank
        if self.config.tie_embeddings and self._stage_map.first_rank != self._stage_map.last_rank:
            raise UserError(
                f"tied embeddings need the first and the last stage on one rank, but schedule "
                f"{self._stage_map.schedule!r} has them on ranks {self._stage_map.first_rank} and "
                f"{self._stage_map.last_rank}; set tie_embeddings=False, or take zbv_zero_bubble or dualpipev"
            )
        return Transformer(self.config, self._stage_map.layers_of(pipeline_rank), first, last)

    @property
    def pipeline_layers(self) -> int:
        """Layers that can be cut apart."""
        return self.config.num_layers

    def pipeline_costs(self) -> tuple[list[float], float, float]:
        """Cost of each layer, of the embedding and of the head, in one unit (FLOPs of a token)."""
        config = self.config
        return list(config.flops_per_layer(config.max_seq_len)), 0.0, config.flops_of_head

    def pipeline_stage(self, layers: Sequence[int], first: bool, last: bool) -> Stage:
        """The module of a stage."""
        return Stage(self.built(), layers, first, last)

    def pipeline_hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """What travels between stages for a microbatch, [B, S, D] on the meta device."""
        dtype = next(self.built().parameters()).dtype
        return torch.empty(*inputs["labels"].shape, self.config.d_model, dtype=dtype, device="meta")

    def pipeline_loss(self, output: Tensor, inputs: Mapping[str, Tensor]) -> Sums:
        """Sums over the labels that count, of a batch or a microbatch.

        Args:
            output: [B, S, D], behind the final norm.
            inputs: ``labels`` int64 [B, S], and optionally ``source_ids`` int64 [B].

        Returns:
            ``loss`` (cross entropy and z-loss of the head; differentiable), ``num_tokens``, ``cross_entropy`` in nats
            and ``z``. Outside of training also ``bytes`` of the tokens, and ``source_I`` and ``source_I_tokens``, the
            cross entropy of each source of the data and its tokens.
        """
        labels = inputs["labels"]
        counted = labels != IGNORE_INDEX
        losses = self.built().loss(output, labels)
        cross_entropy_BS = losses.cross_entropy_N.view_as(labels)
        sums = {
            "loss": losses.total,
            "num_tokens": counted.sum(),
            "cross_entropy": cross_entropy_BS.sum(),
            "z": losses.z,
        }
        if self.training:
            return sums
        token_bytes = self._token_bytes(labels.device)
        if token_bytes is not None:
            sums["bytes"] = token_bytes[labels.where(counted, 0)].where(counted, 0).sum()
        if "source_ids" in inputs:
            for index in range(len(self.metrics.source_names)):
                from_source = (inputs["source_ids"] == index)[:, None]
                sums[f"source_{index}"] = cross_entropy_BS.where(from_source, 0.0).sum()
                sums[f"source_{index}_tokens"] = (counted & from_source).sum()
        return sums

    def _pipeline_stats(self, pipeline: PipelineRunner, num_tokens: Tensor) -> RoutingStats | None:
        """Statistics of all layers, on every process of the pipeline: each layer's come from where it is."""
        layers, experts = self.config.num_moe_layers, self.config.num_experts
        if not layers:
            return None
        flat = torch.zeros(layers, 2 * experts + 3, dtype=torch.float64, device=pipeline.device)
        for stage, module in pipeline.modules.items():
            assert isinstance(module, Stage)
            stats = module.take_stats()
            if stats is None:
                continue
            columns = [stats.counts, stats.prob_sum, *(x[:, None] for x in (stats.entropy_sum, stats.z_sum))]
            numbers = [layer - self.config.num_dense_layers for layer in pipeline.stages.layers[stage]]
            rows = [number for number in numbers if number >= 0]
            flat[rows] = torch.cat([x.double() for x in (*columns, stats.balance_sum[:, None])], dim=1)
        pipeline.axis.all_reduce(flat)
        counts, prob_sum, sums = flat.split((experts, experts, 3), dim=1)
        entropy, z, balance = sums.float().unbind(1)
        return RoutingStats(counts.long(), prob_sum.float(), entropy, z, balance, num_tokens.long())

    def _token_bytes(self, device: torch.device) -> Tensor | None:
        """Bytes of each token of the vocabulary, int64 [V], if the data module knows its tokenizer."""
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is None:
            return None
        known = torch.as_tensor(tokenizer.token_bytes, dtype=torch.int64, device=device)
        return torch.nn.functional.pad(known, (0, self.config.vocab_size - len(known)))
