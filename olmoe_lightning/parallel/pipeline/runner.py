"""Running a model that is cut into stages: torch's schedules for training, a plain pass for everything else.

A stage is a module from a hidden state to a hidden state; the first one starts from the batch's inputs, the last one
ends in sums (a loss and whatever else is wanted). All ranks of a pipeline have the same batch, so that only hidden
states and their gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.mesh import Axis
from olmoe_lightning.parallel.pipeline.declared import Declared, owned
from olmoe_lightning.parallel.pipeline.stages import StageMap, find_pipeline_schedule

Sums = dict[str, Tensor]
"""Sums over what a microbatch holds, fp32 or fp64 []; those of several microbatches add up."""


class StageBuilder(Protocol):
    """Cuts a model into stages.

    It may also have ``pipeline_costs() -> (cost of each layer, of what comes before, of what comes behind)``, in one
    unit, so that the stages come out evenly.
    """

    @property
    def pipeline_layers(self) -> int:
        """Number of layers that can be cut apart."""

    def pipeline_stage(self, layers: Sequence[int], first: bool, last: bool) -> nn.Module:
        """The module of these layers, sharing the model's parameters: ``forward(x, **batch) -> Tensor``.

        In the first stage ``x`` is what the pipeline was given, else what the stage before returned.
        """

    def pipeline_hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """A tensor on the meta device with shape and dtype of what stages return for a microbatch of these inputs."""

    def pipeline_loss(self, output: Tensor, inputs: Mapping[str, Tensor]) -> Sums:
        """Sums of a microbatch from what the last stage returned: ``loss``, which is differentiated, and any others.

        The names must not change between microbatches of training, nor between those of evaluation.
        """


_PREFIX = "batch_"


class _Stage(nn.Module):
    """Takes the batch under names that torch's ``step`` has no other use for, and sends what was declared.

    Args:
        module: the layers.
        stage: its number.
        hidden: what is sent, on the meta device.
        declared: compares it with what the module returns.
        last: whether nothing is sent.
    """

    def __init__(self, module: nn.Module, stage: int, hidden: Tensor, declared: Declared, last: bool) -> None:
        super().__init__()
        self.module = module
        self._stage, self._hidden, self._declared, self._last = stage, hidden, declared, last

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        if self._stage:
            x = _DenseGradient.apply(x)  # type: ignore[no-untyped-call]
        y = self.module(x, **{name.removeprefix(_PREFIX): value for name, value in batch.items()})
        if self._last and isinstance(y, Tensor):
            return owned(y)
        trained = (weight for weight in self.module.parameters() if weight.requires_grad)
        anchor = x if x.requires_grad else next(trained, None)
        return self._declared.output(y, self._hidden, self._stage, anchor)


class _DenseGradient(torch.autograd.Function):
    """The gradient that travels back is dense in memory: that of a sum, for example, is expanded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class PipelineRunner:
    """The stages of one process, and how batches pass through them.

    Args:
        model: what is cut.
        stages: which layers are where, and the schedule.
        axis: the processes of the pipeline.
        device: of this process.
        num_microbatches: M, parts into which the rows of a batch are cut.
    """

    def __init__(
        self, model: StageBuilder, stages: StageMap, axis: Axis, device: torch.device, num_microbatches: int
    ) -> None:
        self.model = model
        self.stages = stages
        self.axis = axis
        self.device = device
        self.num_microbatches = num_microbatches
        self.modules: dict[int, nn.Module] = {
            stage: model.pipeline_stage(stages.layers[stage], stage == 0, stage == stages.num_stages - 1)
            for stage in stages.stages_of(axis.rank)
        }
        self._pipeline_schedules: dict[Any, Any] = {}
        self._declared = Declared(axis, device)
        self._batch: Mapping[str, Tensor] = {}
        self._sums: list[Sums] = []
        self._names: dict[str, list[str]] = {}  # of the sums of each kind of pass

    @property
    def has_last(self) -> bool:
        """Whether the last stage is here."""
        return self.stages.num_stages - 1 in self.modules

    def train(self, first: Tensor, batch: Mapping[str, Tensor]) -> Sums:
        """Forward and backward passes of a batch by the schedule; gradients of the sums are left at the parameters.

        Args:
            first: input of the first stage, [B, ...].
            batch: what every stage may look at; each tensor [B, ...].

        Returns:
            The sums over the batch, on every process of the pipeline.

        Raises:
            UserError: the batch cannot be cut, or the module does something else than it declares; on all of them.
        """
        count = self.num_microbatches
        if _has_rows(first) and len(first) % count:
            raise UserError(
                f"a batch of {len(first)} rows cannot be cut into num_microbatches ({count}) equal parts; choose a "
                "batch size that is a multiple of it, and drop_last=True"
            )
        hidden = self._begin("training", first, batch, count)
        schedule = self._pipeline_schedule(first, batch, hidden)
        self._batch, self._sums = batch, []
        rows = torch.arange(len(first))  # the loss finds its part of the batch by them, without asking the device
        arguments = (first,) if 0 in self.modules else ()
        losses: list[Tensor] | None = [] if self.has_last else None
        extras = {_PREFIX + name: value for name, value in batch.items()}
        schedule.step(*arguments, target=rows if self.has_last else None, losses=losses, return_outputs=False, **extras)
        self._batch = {}
        self._declared.agree()
        return self._everywhere("training")

    @torch.no_grad()
    def evaluate(self, first: Tensor, batch: Mapping[str, Tensor]) -> Sums:
        """The same without gradients: stage after stage, each as soon as its input is there."""
        self._sums = []
        count = self._parts(first)
        self._begin("evaluation", first, batch, count)
        self._pass(first, batch, lambda output, inputs: self._sums.append(self._checked(output, inputs)), count)
        self._declared.agree()
        return self._everywhere("evaluation")

    @torch.no_grad()
    def forward(self, first: Tensor, batch: Mapping[str, Tensor], parts: int | None = None) -> Tensor | None:
        """What the last stage returns for a batch, [B, ...], where that stage is; ``None`` on the other processes.

        Args:
            first: as in :meth:`train`.
            batch: as in :meth:`train`.
            parts: microbatches; ``None``: as many as in training if the rows come out even, else one.
        """
        outputs: list[Tensor] = []
        count = parts or self._parts(first)
        self._begin("forward", first, batch, count, sizes=False)
        self._pass(first, batch, lambda output, _: outputs.append(output), count)
        self._declared.agree()
        return torch.cat(outputs) if self.has_last else None

    def from_last(self, tensor: Tensor) -> Tensor:
        """Overwrite in place with the tensor of the process that has the last stage."""
        return self.axis.broadcast(tensor, self.stages.last_rank)

    def _pass(
        self,
        first: Tensor,
        batch: Mapping[str, Tensor],
        end: Callable[[Tensor, Mapping[str, Tensor]], None],
        count: int,
    ) -> None:
        """Send the parts of a batch through the stages; ``end`` gets the last stage's output and its part's inputs."""
        outputs: dict[tuple[int, int], Tensor] = {}
        sends = []
        for stage in sorted(self.modules):
            for part in range(count):
                rows = slice(part * len(first) // count, (part + 1) * len(first) // count)
                inputs = {name: value[rows] for name, value in batch.items()}
                hidden = self.model.pipeline_hidden(inputs)
                if stage == 0:
                    x = first[rows]
                elif (stage - 1, part) in outputs:
                    x = outputs.pop((stage - 1, part))
                else:
                    x = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.device)
                    dist.recv(x, group=self.axis.group, group_src=self.stages.rank_of(stage - 1))
                y = self.modules[stage](x, **inputs)
                last = stage == self.stages.num_stages - 1
                if not (last and isinstance(y, Tensor)):
                    y = self._declared.output(y, hidden, stage)
                if last:
                    end(y, inputs)
                elif self.stages.rank_of(stage + 1) == self.axis.rank:
                    outputs[stage, part] = y
                else:
                    work = dist.isend(y, group=self.axis.group, group_dst=self.stages.rank_of(stage + 1))
                    sends.append((work, y))
        for work, _ in sends:
            assert work is not None
            work.wait()

    def _parts(self, first: Any) -> int:
        """Microbatches of an evaluation batch: as many as in training if they come out even, else one."""
        rows = len(first) if isinstance(first, Tensor) and first.ndim else 1
        return self.num_microbatches if rows % self.num_microbatches == 0 else 1

    def _begin(self, kind: str, first: Tensor, batch: Mapping[str, Tensor], parts: int, sizes: bool = True) -> Tensor:
        """Compare a batch with that of the other ranks; what travels between stages for a part of it."""
        found = {name: value[: len(value) // parts] for name, value in batch.items() if _has_rows(value)}
        hidden = self.model.pipeline_hidden(found)
        self._declared.begin(kind, first, batch, hidden, sizes)
        return torch.empty(hidden.shape, dtype=hidden.dtype, device="meta")

    def _checked(self, output: Tensor, inputs: Mapping[str, Tensor]) -> Sums:
        """The sums of a microbatch, each one number on the device; zeros if they are not what they should be."""
        training = torch.is_grad_enabled()
        nothing = {"loss": (output * 0).sum() if training else torch.zeros((), device=self.device)}
        if self._declared.failed:
            return nothing  # what came here is not what this stage is made for
        sums: Any = self.model.pipeline_loss(output, inputs)
        problem = self._declared.sums(sums, training and output.requires_grad)
        if problem:
            self._declared.report(problem)
            return nothing
        return {name: owned(torch.as_tensor(value, device=self.device).view(())) for name, value in sums.items()}

    def _everywhere(self, kind: str) -> Sums:
        """Add the microbatches up, on every process; names are exchanged once for each kind of pass."""
        sums, self._sums = self._sums, []
        names: list[str] = []
        values = torch.zeros(0, dtype=torch.float64, device=self.device)
        if self.has_last:
            names = sorted(sums[0])
            rows = [torch.stack([each[name].detach().double() for name in names]) for each in sums]
            values = torch.stack(rows).sum(0)
        if self.axis.size > 1:
            if kind not in self._names:
                self._names[kind] = self.axis.broadcast_object(names, self.stages.last_rank)
            known = self._names[kind]
            if not self.has_last:
                values = torch.zeros(len(known), dtype=torch.float64, device=self.device)
            elif names != known:
                raise RuntimeError(f"pipeline_loss returned the sums {names}, after {known} in an earlier {kind} pass")
            self.from_last(values)
            names = known
        return dict(zip(names, values, strict=True))

    def _pipeline_schedule(self, first: Tensor, batch: Mapping[str, Tensor], hidden: Tensor) -> Any:
        """The schedule for batches of this shape; static shapes, so that torch does not try the stages out."""
        count = self.num_microbatches
        shapes = tuple((name, value.shape) for name, value in batch.items())
        key = (first.shape, first.dtype, hidden.shape, hidden.dtype, shapes)
        if key not in self._pipeline_schedules:
            start = torch.empty_like(first[: len(first) // count], device="meta")
            stages = [
                PipelineStage(
                    _Stage(module, stage, hidden, self._declared, stage == self.stages.num_stages - 1),
                    stage,
                    self.stages.num_stages,
                    self.device,
                    input_args=start if stage == 0 else hidden.clone().requires_grad_(),
                    output_args=hidden.clone().requires_grad_(),
                    group=self.axis.group,
                )
                for stage, module in self.modules.items()
            ]
            found = find_pipeline_schedule(self.stages.pipeline_schedule)
            # Losses are sums: nothing is to be divided.
            self._pipeline_schedules[key] = found.build(stages, count, self._loss)
        return self._pipeline_schedules[key]

    def _loss(self, output: Tensor, rows: Tensor) -> Tensor:
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        sums = self._checked(output, {name: value[part] for name, value in self._batch.items()})
        self._sums.append(sums)
        return sums["loss"]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
