"""One MoE layer on the tokens of all processes: what a process should find, and how that is compared.

Every process makes the tokens of all processes from the same seed, so that it can compute by itself, with all experts
in one place, what it should receive, return and differentiate.

T tokens, K chosen experts, E experts of all processes, E_local of each, D model width, R rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from olmoe_lightning.kernels import LocalTransport, Transport, expert_mlp
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm.base import CommSpec

LEAVES = ("tokens", "weights", "w_gate_up", "w_down")
MOVED = ("offsets", "rows", "row weights")

Outcome = dict[str, Tensor | None]
"""What a layer received, returned and learned, by name."""


class Setting(NamedTuple):
    """Where a plugin is checked."""

    axis: Axis
    device: torch.device
    dtype: torch.dtype


@dataclass
class Findings:
    """What a process saw in one case."""

    problems: list[str] = field(default_factory=list)
    deviation: float = 0.0
    """The largest; relative to the largest value of its tensor."""


@dataclass
class Layer:
    """One MoE layer's tokens and experts as leaves of an autograd graph: of one process, or of all together."""

    tokens: Tensor
    ids: Tensor
    weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    ignoring: int = 0
    """So many experts, the first ones, take no notice of their rows' weights."""

    def forward(self, transport: Transport) -> Outcome:
        """Dispatch, experts, combine."""
        sent = transport.dispatch(self.tokens, self.ids, self.weights)
        scale = sent.row_weights_R
        if self.ignoring == len(sent.offsets_E):
            scale = torch.ones_like(scale)  # the graph does not reach the weights
        elif self.ignoring:
            rest = int(sent.offsets_E[self.ignoring - 1])
            scale = torch.cat([torch.ones_like(scale[:rest]), scale[rest:]])
        rows = expert_mlp(sent.rows_RD, self.w_gate_up, self.w_down, scale, sent.offsets_E)
        outputs = transport.combine(rows, sent.handle)
        end = int(sent.offsets_E[-1])  # the rows behind are padding
        received = (sent.offsets_E, sent.rows_RD[:end], sent.row_weights_R[:end])
        return {**dict(zip(MOVED, received, strict=True)), "outputs": outputs}

    def backward(self, outcome: Mapping[str, Tensor | None], grad_TD: Tensor) -> Outcome:
        """Add the leaves' gradients."""
        outputs = outcome["outputs"]
        assert outputs is not None
        outputs.backward(grad_TD)
        leaves = {name: getattr(self, name) for name in LEAVES}
        return dict(outcome) | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}


@dataclass
class Batch:
    """The tokens, choices and experts of all processes, and the gradient of the loss by the layer's outputs."""

    tensors: dict[str, Tensor]
    grad_TD: Tensor
    starts: list[int]
    """First token of each process, and the end of all."""
    spec: CommSpec
    trained: Collection[str] = LEAVES
    ignoring: int = 0

    def layer(self, tokens: slice = slice(None), experts: slice = slice(0, None)) -> Layer:
        """A part of it, or all, as new leaves."""
        parts = {
            name: tensor[experts if name.startswith("w_") else tokens].detach().clone()
            for name, tensor in self.tensors.items()
        }
        for name in self.trained:
            parts[name].requires_grad_()
        return Layer(**parts, ignoring=min(len(parts["w_down"]), max(0, self.ignoring - experts.start)))

    def part_of(self, axis: Axis) -> tuple[slice, slice]:
        """The tokens and experts of one process."""
        experts = self.spec.num_experts // axis.size
        return (
            slice(self.starts[axis.rank], self.starts[axis.rank + 1]),
            slice(axis.rank * experts, (axis.rank + 1) * experts),
        )

    def own_grad(self, axis: Axis) -> Tensor:
        """The outputs' gradient of one process."""
        return self.grad_TD[self.part_of(axis)[0]]

    def expected(self, axis: Axis, backward: bool = True) -> Outcome:
        """What one process should find, cut from a computation with everything in one place."""
        layer = self.layer()
        outcome = layer.forward(LocalTransport(self.spec.num_experts))
        if backward:
            outcome = layer.backward(outcome, self.grad_TD)
        tokens, experts = self.part_of(axis)
        ends = [0, *layer.ids.flatten().bincount(minlength=self.spec.num_experts).cumsum(0).tolist()]
        first, end = ends[experts.start], ends[experts.stop]
        cuts = dict.fromkeys(outcome, tokens) | {"rows": slice(first, end), "row weights": slice(first, end)}
        cuts |= {"offsets": experts, "gradient of w_gate_up": experts, "gradient of w_down": experts}
        cut = {name: None if whole is None else whole[cuts[name]] for name, whole in outcome.items()}
        return cut | {"offsets": torch.tensor(ends[experts.start + 1 : experts.stop + 1]).to(layer.ids.device) - first}


def compare(found: Outcome, wanted: Outcome, findings: Findings, prefix: str = "") -> None:
    """Note what differs."""
    for name, want in wanted.items():
        problem = _difference(name, found.get(name), want, findings)
        if problem:
            findings.problems.append(f"{prefix}{name}: {problem}")


def _difference(name: str, got: Tensor | None, want: Tensor | None, findings: Findings) -> str | None:
    if want is None:  # zeros are as good as no gradient
        return None if got is None or not got.any() else "there, but nothing is expected"
    if got is None:
        return "missing"
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, expected {list(want.shape)}"
    if name == "offsets":
        if got.dtype != torch.int32:
            return f"{got.dtype}, expected torch.int32"
    elif got.dtype != want.dtype:
        return f"{got.dtype}, expected {want.dtype}"
    if not want.numel():
        return None
    # What is only moved must be equal to the bit. Else products of few and of many rows may round differently, and
    # the K rows of a token may be added in another order: a few roundings, of values that are rounded to this dtype.
    tolerance = 0.0 if name in MOVED else max(4e-6, 4 * torch.finfo(want.dtype).eps)
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    error = ((got - want).abs() / want.abs().max().clamp(min=1e-30)).nan_to_num(float("inf"))
    findings.deviation = max(findings.deviation, float(error.max()))
    wrong = error > tolerance
    if not wrong.any():
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} values differ, the first at {list(place)}: "
        f"{got[place].item():.6g} instead of {want[place].item():.6g}"
    )
