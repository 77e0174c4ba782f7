"""What a builder of stages declares, compared with what its stages do, at the first batch of each kind.

Receivers make their buffers from ``pipeline_hidden``: a stage that returns something else would leave uninitialised
memory in them, or stop the others half way. So a stage whose output does not fit sends zeros, the pass comes to its
end, and before anything is made of it all ranks of the pipeline exchange what they found and raise the same error.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from olmoe_lightning._torch import is_view
from olmoe_lightning.errors import UserError, shortened
from olmoe_lightning.parallel.mesh import Axis


class Declared:
    """Compares, and agrees with the other ranks of a pipeline.

    Args:
        axis: the processes of the pipeline.
        device: of this process.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis = axis
        self.device = device
        self._agreed: set[Hashable] = set()
        self._kinds: set[str] = set()
        self._key: Hashable = None  # of the batch under way
        self._problems: list[str] = []

    # ---------------------------------------------------------------------------------------------- a batch begins

    def begin(self, kind: str, first: Any, batch: Mapping[str, Any], hidden: Any, sizes: bool = True) -> None:
        """A batch is about to pass; the first one of its kind is compared with that of the other ranks; collective.

        Args:
            kind: of the pass.
            first: input of the first stage.
            batch: what every stage may look at.
            hidden: of ``pipeline_hidden``, for a part of the batch.
            sizes: whether batches of other sizes are another kind.

        Raises:
            UserError: it is not made of tensors with the same number of rows, the ranks have different batches, or
                they declare different things.
        """
        inputs = {"the input": first, **batch}
        wrong = [f"{name} is a {type(v).__name__}" for name, v in inputs.items() if not isinstance(v, Tensor)]
        if not wrong:
            wrong = [
                f"{name} has the shape {list(value.shape)}"
                for name, value in inputs.items()
                if not value.ndim or len(value) != len(first)
            ]
        if not wrong and len(first) == 0:
            wrong = ["the batch has no rows"]
        if wrong:
            raise UserError(
                f"a pipeline cuts a batch into microbatches along its rows, so that all of it must be tensors of one "
                f"length: {shortened(wrong, 3)}"
            )
        shapes = tuple((name, tuple(v.shape) if sizes else v.ndim, v.dtype) for name, v in inputs.items())
        self._key, self._problems = (kind, shapes, torch.is_autocast_enabled(self.device.type)), []
        if self._key in self._agreed or self.axis.size == 1:
            return
        values = () if kind in self._kinds else tuple(_checksum(value) for value in inputs.values())
        self._kinds.add(kind)
        everyone = self.axis.all_gather_objects((describe(hidden), shapes, values))
        declared, *batches = zip(*everyone, strict=True)
        for rank, (its_shapes, its_values) in enumerate(zip(*batches, strict=True)):
            if (its_shapes, its_values) != everyone[0][1:]:
                found = "other values" if its_shapes == everyone[0][1] else f"{_shown(its_shapes)}"
                raise UserError(
                    f"pipeline rank {rank} has another batch than rank 0 ({found} instead of those of "
                    f"{_shown(everyone[0][1])}); all stages of a pipeline must get the same batches: let samplers "
                    "take trainer.distributed_sampler_kwargs, and draw random numbers from one seed"
                )
        for rank, its_hidden in enumerate(declared):
            if its_hidden != declared[0]:
                raise UserError(
                    f"pipeline_hidden declares {declared[0]} on pipeline rank 0 and {its_hidden} on rank {rank}; it "
                    "must say the same on all: what travels between any two stages"
                )

    # ---------------------------------------------------------------------------------------------- what stages do

    def output(self, value: Any, hidden: Tensor, stage: int, anchor: Tensor | None = None) -> Tensor:
        """What a stage sends on: its output, dense in memory; zeros where that is not what was declared.

        Args:
            value: that it returned.
            hidden: of ``pipeline_hidden``.
            stage: its number.
            anchor: what zeros are to depend on, so that the backward pass comes to its end too.

        Raises:
            UserError: it is not, after the first batch of this kind was right: on this rank alone.
        """
        where = ""
        if isinstance(value, Tensor):
            here = (value.device.type, value.device.index or 0) == (self.device.type, self.device.index or 0)
            if here and value.shape == hidden.shape and value.dtype == hidden.dtype:
                return owned(value.contiguous())
            where = "" if here else f" on {value.device}"
        self.report(
            f"stage {stage} returned {describe(value)}{where} for a microbatch, but pipeline_hidden declares "
            f"{describe(hidden)} on {self.device}; let the stage return one such tensor, or declare what it returns"
        )
        zeros = torch.zeros(hidden.shape, dtype=hidden.dtype, device=self.device)
        return zeros if anchor is None else zeros + (anchor * 0).sum().to(zeros)

    def sums(self, value: Any, trains: bool) -> str:
        """What is wrong with what ``pipeline_loss`` returned; empty if nothing is.

        Args:
            value: that it returned.
            trains: whether its loss is to be differentiated.
        """
        if not isinstance(value, Mapping) or "loss" not in value:
            found = sorted(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            return f"pipeline_loss returned {found}; it must return a dictionary of sums with 'loss' in it"
        for name, item in value.items():
            size = item.numel() if isinstance(item, Tensor) else 1 if isinstance(item, int | float) else 0
            if size != 1:
                shape = f" of shape {list(item.shape)}" if isinstance(item, Tensor) else ""
                return (
                    f"pipeline_loss returned {name!r} as a {type(item).__name__}{shape}; it must be one number, a sum"
                )
        loss = value["loss"]
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            return f"pipeline_loss returned {describe(loss)} as the loss; it must be a floating-point tensor"
        if trains and not loss.requires_grad:
            return "pipeline_loss returned a loss that depends on nothing that is trained; do not detach it"
        return ""

    def report(self, problem: str) -> None:
        """Keep a problem until all ranks agree on it.

        Raises:
            UserError: batches of this kind were found right before.
        """
        if self._key in self._agreed:
            raise UserError(problem)
        self._problems.append(problem)

    @property
    def failed(self) -> bool:
        """Whether something was wrong with the batch under way, on this rank."""
        return bool(self._problems)

    # ---------------------------------------------------------------------------------------------- it has passed

    def agree(self) -> None:
        """The first batch of a kind has passed; collective then.

        Raises:
            UserError: something was wrong; the same on all ranks.
        """
        if self._key in self._agreed:
            return
        problems = [each for rank in self.axis.all_gather_objects(self._problems[:1]) for each in rank]
        if problems:
            raise UserError(problems[0])
        self._agreed.add(self._key)


def owned(value: Tensor) -> Tensor:
    """The same values, not as a view of something: schedules that split the backward pass detach outputs in place."""
    return value.clone() if is_view(value) else value


def describe(value: Any) -> str:
    """What a value is, for comparisons and messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _checksum(value: Tensor) -> int:
    dense = value.detach().contiguous().cpu().view(-1)
    return zlib.crc32(dense.view(torch.uint8).numpy().tobytes()) if dense.numel() else 0


def _shown(shapes: tuple[tuple[str, Any, torch.dtype], ...]) -> str:
    return ", ".join(f"{name} {list(shape) if isinstance(shape, tuple) else shape}" for name, shape, _ in shapes)
