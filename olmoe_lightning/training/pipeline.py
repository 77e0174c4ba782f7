"""Pipelines under Lightning: what a module must offer, how it is cut, and the step that it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from olmoe_lightning.parallel.pipeline.runner import PipelineRunner, Sums
from olmoe_lightning.parallel.pipeline.stages import StageMap, make_stage_map
from olmoe_lightning.training.processes import MeshStrategy


@runtime_checkable
class PipelineModule(Protocol):
    """What a LightningModule offers so that it can be cut into stages.

    In ``configure_model`` it builds the layers that ``self.trainer.strategy.stage_map`` gives to its pipeline rank (and
    the parts before the first and behind the last one, where these are). In its steps it calls
    ``self.trainer.strategy.pipeline_step(first, batch)`` instead of running itself; ``training_step`` then returns
    ``{"loss": mean, "num_tokens": n}`` of the sums it got, which are the same on all ranks of the pipeline.

    It may also have ``pipeline_costs() -> (cost of each layer, of what comes before, of what comes behind)``, in one
    unit, so that the stages come out evenly.
    """

    @property
    def pipeline_layers(self) -> int:
        """Number of layers that can be cut apart."""

    def pipeline_stage(self, layers: Sequence[int], first: bool, last: bool) -> nn.Module:
        """The module of these layers, sharing the parameters of this one: ``forward(x, **batch) -> Tensor``.

        In the first stage ``x`` is what ``pipeline_step`` was given, else what the stage before returned.
        """

    def pipeline_hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """A tensor on the meta device with shape and dtype of what stages return for a microbatch of these inputs."""

    def pipeline_loss(self, output: Tensor, inputs: Mapping[str, Tensor]) -> Sums:
        """Sums of a microbatch from what the last stage returned: ``loss``, which is differentiated, and any others.

        The names must not change between microbatches.
        """


class PipelineStrategy(MeshStrategy):
    """The pipeline's part of :class:`~olmoe_lightning.MoEStrategy`.

    Args:
        pipeline_parallel_size: see there.
        schedule: see there.
        num_microbatches: see there.
        stages_per_rank: see there.
        pipeline_split: see there.
        kwargs: of :class:`MeshStrategy`.
    """

    def __init__(
        self,
        pipeline_parallel_size: int,
        schedule: str,
        num_microbatches: int | None,
        stages_per_rank: int | None,
        pipeline_split: list[int] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pipeline_parallel_size, **kwargs)
        self.schedule = schedule
        self.num_microbatches = num_microbatches or 2 * pipeline_parallel_size
        self.stages_per_rank = stages_per_rank
        self.pipeline_split = pipeline_split
        self.stage_map: StageMap | None = None
        """Which layers are where; ``None`` without a pipeline."""
        self.pipeline: PipelineRunner | None = None
        """The stages of this process, once the model is set up."""

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self.stage_map = None
        if self.pipeline_parallel_size == 1:
            return
        if not isinstance(model, PipelineModule):
            names = [name for name in vars(PipelineModule) if name.startswith("pipeline_")]
            missing = [name for name in names if not hasattr(model, name)]
            raise MisconfigurationException(
                f"{type(model).__name__} cannot be cut into stages: it has no {', '.join(missing)}; implement "
                "olmoe_lightning.training.pipeline.PipelineModule, or set pipeline_parallel_size=1"
            )
        costs = getattr(model, "pipeline_costs", None)
        layers, first, last = costs() if costs is not None else (None, 0.0, 0.0)
        self.stage_map = make_stage_map(
            self.schedule,
            self.pipeline_parallel_size,
            self.stages_per_rank,
            model.pipeline_layers,
            self.num_microbatches,
            layer_costs=layers,
            first_cost=first,
            last_cost=last,
            split=self.pipeline_split,
        )

    def _build_pipeline(self, module: LightningModule) -> None:
        """Make the stages; the module has its final device and precision."""
        self.pipeline = None
        if self.stage_map is not None:
            assert isinstance(module, PipelineModule)
            axis = self.mesh.pipeline
            self.pipeline = PipelineRunner(module, self.stage_map, axis, self.root_device, self.num_microbatches)

    def pipeline_step(self, first: Tensor, batch: Mapping[str, Tensor]) -> Sums:
        """Send a batch through all stages; in training, back as well. Every rank of the pipeline has the same batch.

        Args:
            first: input of the first stage, [B, ...].
            batch: what the stages and the loss may look at, each [B, ...].

        Returns:
            The sums of ``pipeline_loss`` over the batch, fp64 [], the same on all ranks of the pipeline.

        Raises:
            ValueError: the rows cannot be cut into microbatches.
            RuntimeError: there is no pipeline.
        """
        if self.pipeline is None or self.lightning_module is None:
            raise RuntimeError("pipeline_step needs pipeline_parallel_size > 1 and a model that is set up")
        if not (self.lightning_module.training and torch.is_grad_enabled()):
            return self.pipeline.evaluate(first, batch)
        self._before_pipeline_backward()
        return self.pipeline.train(first, batch)

    def pipeline_forward(self, first: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Send a batch through all stages, without gradients; for ``predict_step`` above all.

        Args:
            first: as in :meth:`pipeline_step`.
            batch: as in :meth:`pipeline_step`.

        Returns:
            What the last stage makes of the batch, with shape and dtype of ``pipeline_hidden``, on every rank of the
            pipeline.

        Raises:
            RuntimeError: there is no pipeline.
        """
        if self.pipeline is None:
            raise RuntimeError("pipeline_forward needs pipeline_parallel_size > 1 and a model that is set up")
        output = self.pipeline.forward(first, batch)
        if output is None:
            output = torch.empty_like(self.pipeline.model.pipeline_hidden(batch), device=self.root_device)
        return self.pipeline.from_last(output.contiguous())

    def _before_pipeline_backward(self) -> None:
        """Gradients are about to appear."""
