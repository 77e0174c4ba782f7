"""Loss sums of a batch over its tokens, whether one process has all layers or a pipeline cuts them into stages.

Sums add up exactly over microbatches, accumulated batches and processes, whatever their numbers of tokens. Lightning
wants a mean of ``training_step``, for its progress bar and its loops: :func:`mean_output` divides and
:func:`read_output` multiplies back, here and nowhere else.

B batch, S sequence, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError
from olmoe_lightning.model import RoutingStats, Transformer
from olmoe_lightning.model.losses import IGNORE_INDEX
from olmoe_lightning.model.stage import Stage
from olmoe_lightning.parallel.pipeline.runner import PipelineRunner, Sums
from olmoe_lightning.training.loss_graph import NARROW, passes_narrow
from olmoe_lightning.training.metrics import LanguageModelMetrics


class Output(NamedTuple):
    """What ``training_step`` returned."""

    loss: Tensor
    """[], a mean."""
    num_tokens: Tensor
    """[], what it is a mean over; 1 of a module that does not say."""
    counted: bool
    """Whether the module says."""

    def differentiated(self) -> tuple[Tensor, Tensor | None]:
        """What is differentiated, [], and what the gradients of parameters are multiplied by then, fp32 [].

        It is the sum over tokens and ``None``, unless the number of tokens would be rounded on its way back (257 are
        256 in bf16, and more than 65504 are infinite in fp16): then it is the mean.
        """
        if not self.counted:
            return self.loss, None
        if passes_narrow(self.loss):
            return self.loss, self.num_tokens.to(torch.float32)
        return self.loss * self.num_tokens.to(self.loss.dtype), None


def mean_output(sums: Sums) -> dict[str, Tensor]:
    """What ``training_step`` returns: ``loss``, [], mean over ``num_tokens``, []."""
    return {"loss": sums["loss"] / sums["num_tokens"].clamp(min=1), "num_tokens": sums["num_tokens"]}


def read_output(output: Any) -> Output | None:
    """The reverse, of any module: a loss, or a mapping with ``loss`` and optionally ``num_tokens``; ``None`` of others.

    Args:
        output: of ``training_step``.

    Raises:
        UserError: the loss or the number of tokens is not one number, or the latter may have been rounded already.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        return None
    tokens = output.get("num_tokens") if isinstance(output, Mapping) else None
    try:
        count = torch.as_tensor(1 if tokens is None else tokens, device=loss.device)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(tokens).__name__
        raise UserError(f"training_step returned num_tokens as a {kind}; it must be one number") from error
    for name, value in (("loss", loss), ("num_tokens", count)):
        if value.numel() != 1 or value.is_complex():
            raise UserError(
                f"training_step returned a {name} of {value.dtype} and shape {list(value.shape)}; it must be one number"
            )
    if count.dtype in NARROW:
        limit = 256 if count.dtype == torch.bfloat16 else 2048
        raise UserError(
            f"num_tokens is {count.dtype}, which rounds numbers above {limit}; count integers: "
            "(labels != -100).sum(), or mask.bool().sum() of a floating-point mask, which a precision plugin may have "
            "narrowed"
        )
    return Output(loss, count.reshape(()), tokens is not None)


class Objective:
    """The sums of a language model over the labels that count, and the stages of its transformer.

    Args:
        config: of the transformer.
        model: the transformer with the layers of this process, once it is built.
        metrics: knows the sources of the data.
        token_bytes: bytes of each token of the vocabulary, int64 [V], on a device, if that is known.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: Callable[[], Transformer],
        metrics: LanguageModelMetrics,
        token_bytes: Callable[[torch.device], Tensor | None],
    ) -> None:
        self.config = config
        self._model = model
        self._metrics = metrics
        self._token_bytes = token_bytes

    def whole(
        self, batch: Mapping[str, Tensor], aux_scale: Callable[[Tensor], Tensor] | None
    ) -> tuple[Sums, RoutingStats | None]:
        """Of a batch whose layers are all in this process.

        Args:
            batch: ``input_ids``, ``labels`` and what else :class:`~olmoe_lightning.OLMoE` takes.
            aux_scale: from the number of tokens, int64 [], to the factor of the routers' losses in the backward pass,
                fp32 []; ``None`` without a backward pass.

        Returns:
            The sums of :meth:`pipeline_loss` and the statistics of the routers.
        """
        counted = batch["labels"] != IGNORE_INDEX
        scale = aux_scale(counted.sum().clamp(min=1)) if aux_scale is not None else None
        hidden, stats = self._model()(batch["input_ids"], batch.get("document_ids"), counted, scale)
        return self.pipeline_loss(hidden, batch), stats

    def staged(
        self,
        batch: Mapping[str, Tensor],
        step: Callable[[Tensor, Mapping[str, Tensor]], Sums],
        pipeline: PipelineRunner,
    ) -> tuple[Sums, RoutingStats | None]:
        """Of a batch that passes through the stages of a pipeline; in training its gradients have then been made too.

        Args:
            batch: as in :meth:`whole`.
            step: sends it through.
            pipeline: the stages of this process.

        Returns:
            As :meth:`whole`, the same on all processes of the pipeline.
        """
        inputs = {name: batch[name] for name in ("labels", "document_ids", "source_ids") if name in batch}
        sums = step(batch["input_ids"], inputs)
        return sums, self._stats_of_stages(pipeline, sums["num_tokens"])

    # ---------------------------------------------------------------------------------------------- stages

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
        return Stage(self._model(), layers, first, last)

    def pipeline_hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """What travels between stages for a microbatch, [B, S, D] on the meta device."""
        dtype = next(self._model().parameters()).dtype
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
        model = self._model()
        losses = model.loss(output, labels)
        cross_entropy_BS = losses.cross_entropy_N.view_as(labels)
        sums = {
            "loss": losses.total,
            "num_tokens": counted.sum(),
            "cross_entropy": cross_entropy_BS.sum(dtype=torch.float64),
            "z": losses.z,
        }
        if model.training:
            return sums
        token_bytes = self._token_bytes(labels.device)
        if token_bytes is not None:
            sums["bytes"] = token_bytes[labels.where(counted, 0)].where(counted, 0).sum()
        if "source_ids" in inputs:
            for index in range(len(self._metrics.source_names)):
                from_source = (inputs["source_ids"] == index)[:, None]
                sums[f"source_{index}"] = cross_entropy_BS.where(from_source, 0.0).sum(dtype=torch.float64)
                sums[f"source_{index}_tokens"] = (counted & from_source).sum()
        return sums

    def _stats_of_stages(self, pipeline: PipelineRunner, num_tokens: Tensor) -> RoutingStats | None:
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
        entropy, z, balance = sums.unbind(1)
        return RoutingStats(counts.long(), prob_sum.float(), entropy.float(), z, balance.float(), num_tokens.long())
