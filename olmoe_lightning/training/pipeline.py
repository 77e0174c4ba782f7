"""Pipelines under Lightning: what a module must offer, how it is cut into stages, and how batches pass through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from olmoe_lightning.parallel.mesh import Axis
from olmoe_lightning.parallel.pipeline.runner import PipelineRunner, StageBuilder
from olmoe_lightning.parallel.pipeline.stages import StageMap, find_pipeline_schedule, make_stage_map

STAGE_BUILDER = ("pipeline_layers", "pipeline_stage", "pipeline_hidden", "pipeline_loss")
"""What a builder of stages must have."""


@runtime_checkable
class PipelineModule(Protocol):
    """What a LightningModule offers so that it can be cut into stages: a builder of them, or the builder's methods.

    In ``configure_model`` it builds the layers that ``self.trainer.strategy.stage_map`` gives to its pipeline rank (and
    the parts before the first and behind the last one, where these are). In its steps it calls
    ``self.trainer.strategy.pipeline_step(first, batch)`` instead of running itself; ``training_step`` then returns
    ``{"loss": mean, "num_tokens": n}`` of the sums it got, which are the same on all ranks of the pipeline.
    """

    def pipeline_stages(self) -> StageBuilder:
        """The builder; it is asked for its layers and costs before the module has built any."""


def stage_builder(module: nn.Module) -> StageBuilder:
    """The builder of a module's stages.

    Raises:
        MisconfigurationException: it has none; the message names what is missing.
    """
    builder: Any = module.pipeline_stages() if isinstance(module, PipelineModule) else module
    missing = [name for name in STAGE_BUILDER if not hasattr(builder, name)]
    if missing:
        raise MisconfigurationException(
            f"{type(module).__name__} cannot be cut into stages: it has no {', '.join(missing)}; implement "
            "olmoe_lightning.training.pipeline.PipelineModule, or set pipeline_parallel_size=1"
        )
    found: StageBuilder = builder
    return found


class Pipeline:
    """The stages of one process, from their plan to their run.

    Args:
        size: processes of a pipeline; 1 is none.
        schedule: see :class:`~olmoe_lightning.MoEStrategy`.
        num_microbatches: see there.
        stages_per_rank: see there.
        split: see there.
    """

    def __init__(
        self,
        size: int,
        schedule: str,
        num_microbatches: int | None,
        stages_per_rank: int | None,
        split: list[int] | None,
    ) -> None:
        self.size = size
        self.schedule = schedule
        self.num_microbatches = num_microbatches or 2 * size
        self.stages_per_rank = stages_per_rank
        self.split = split
        self.stage_map: StageMap | None = None
        """Which layers are where; ``None`` without a pipeline."""
        self.runner: PipelineRunner | None = None
        """The stages of this process, once the model is set up."""

    def plan(self, module: nn.Module) -> None:
        """Decide which layers go where; nothing is built.

        Raises:
            MisconfigurationException: the module cannot be cut.
            UserError: the numbers do not fit the schedule or the module's layers.
        """
        self.stage_map = None
        if self.size == 1:
            return
        builder = stage_builder(module)
        costs = getattr(builder, "pipeline_costs", None)  # optional: without it all layers count the same
        layers, first, last = costs() if costs is not None else (None, 0.0, 0.0)
        self.stage_map = make_stage_map(
            self.schedule,
            self.size,
            self.stages_per_rank,
            builder.pipeline_layers,
            self.num_microbatches,
            layer_costs=layers,
            first_cost=first,
            last_cost=last,
            split=self.split,
        )

    @property
    def splits_backward(self) -> bool:
        """Whether gradients come at other times than at the end of autograd's backward pass."""
        return self.stage_map is not None and find_pipeline_schedule(self.stage_map.pipeline_schedule).splits_backward

    def build(self, module: nn.Module, axis: Axis, device: torch.device) -> None:
        """Make the stages; the module has its final device and precision."""
        self.runner = None
        if self.stage_map is not None:
            self.runner = PipelineRunner(stage_builder(module), self.stage_map, axis, device, self.num_microbatches)

    def built(self, caller: str) -> PipelineRunner:
        """The stages.

        Args:
            caller: who needs them, for the message.

        Raises:
            RuntimeError: there are none.
        """
        if self.runner is None:
            raise RuntimeError(f"{caller} needs pipeline_parallel_size > 1 and a model that is set up")
        return self.runner

    def forward(self, first: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """What the last stage returns for a batch, on every rank of the pipeline, without gradients."""
        runner = self.built("pipeline_forward")
        output = runner.forward(first, batch)
        found = None if output is None else (output.shape, output.dtype)
        shape, dtype = runner.axis.broadcast_object(found, runner.stages.last_rank)
        if output is None:
            output = torch.empty(shape, dtype=dtype, device=runner.device)
        return runner.from_last(output.contiguous())
