"""The user's torch optimizer on its own part of the parameters, and the gradients' way to it.

One optimizer step, seen from one process:

1. Each backward pass leaves gradients of *sums* over tokens; a hook adds them to the buckets' fp32 buffers.
2. In the last backward pass of the step a bucket is reduced over its axis as soon as its gradients are complete, always
   in the same order of buckets, so that all processes issue the same collectives whatever their graphs did.
3. One all-reduce of a short fp64 vector gives every process the number of tokens, the sum of squares, whether a loss
   was not finite, and which parameters were used. From it every process takes the same decision.
4. The gradients are divided by the tokens and clipped in one multiplication, the optimizer updates its part, and the
   buckets are gathered in the order in which the next forward pass needs them.

The result does not depend on the mesh: there is no division by a number of processes anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from olmoe_lightning._torch import is_last_hook
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.buffers import (
    BUCKET_ELEMENTS,
    Bucket,
    NamedParameter,
    Shard,
    Unbucketed,
    adopted,
    make_buckets,
    stays,
)
from olmoe_lightning.parallel.elementwise import refuse_reach, refuse_references
from olmoe_lightning.parallel.grad_norm import LEAST_SQUARES, clip_coefficient, factors
from olmoe_lightning.parallel.ownership import Ownership


@dataclass(frozen=True)
class StepResult:
    """What is known after the gradients of a step were put together; the same on every process."""

    num_tokens: float
    """What the sums were divided by."""
    grad_norm: float
    """Global norm of the mean gradient, before clipping."""
    bad_losses: int
    """Microbatches whose loss was not finite."""
    loss: float
    """Mean over all tokens of the step."""
    asked: tuple[bool, ...] = ()
    """What any process asked for besides."""

    @property
    def finite(self) -> bool:
        """Whether the step may be taken."""
        return self.bad_losses == 0 and self.grad_norm < float("inf")  # NaN is not less


class Numbering(NamedTuple):
    """How ``optimizer.state_dict()`` of a single process numbers parameters: through all groups, frozen ones too."""

    groups: list[list[int]]
    """Numbers by group."""
    of_parameter: dict[int, int]
    """Number there, by number here."""


class ShardedOptimizer:
    """Moves ``optimizer`` in place onto fp32 shards; its object, groups and options stay.

    Args:
        optimizer: element-wise (every option of a group applies to each element alone).
        ownership: names, replicas and order of the module's parameters.
        shard: update only the own part of each bucket; ``False`` keeps the optimizer's state on every process (DDP).
        overlap_reduce: reduce buckets while the backward pass still runs.
        values: fp32 values of parameters that hold them in a narrower dtype.
        bucket_elements: elements at which a bucket is full.
        attach_grads: something else than the autograd engine adds to ``parameter.grad`` (schedules that split the
            backward pass): let it be the buffer itself.

    Raises:
        UserError: the optimizer looks at more than this process has, or it holds a parameter that is not the module's,
            or parameters outside of its groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ownership: Ownership,
        shard: bool = True,
        overlap_reduce: bool = True,
        values: Mapping[nn.Parameter, Tensor] | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
        attach_grads: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.closed = False
        """Whether the run is over."""
        self.ownership = ownership
        self.mesh = ownership.mesh
        self.overlap_reduce = overlap_reduce
        trained = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
        ]
        names = ownership.parameters
        foreign = sum(parameter not in names for parameter in trained)
        if foreign:
            raise UserError(
                f"the optimizer holds {foreign} parameters that are not parameters of the LightningModule; "
                "give it self.parameters() or a part of them"
            )
        chosen = set(trained)
        self.parameters = [
            NamedParameter(name, parameter, index)
            for index, (parameter, name) in enumerate((p, n) for p, n in names.items() if p in chosen)
        ]
        self.axis_of = {parameter: ownership.replicas(parameter) for _, parameter, _ in self.parameters}
        # Gradients of a pipeline are there before Lightning clears those of the optimizer's own parameters.
        all_flat = self.mesh.pipeline.size > 1
        refuse_references(optimizer, {p for p, at in self.axis_of.items() if not stays(p, at, values, all_flat)})
        replicated = any(axis.size > 1 for axis in self.axis_of.values())
        refuse_reach(
            optimizer,
            sharded=shard and replicated,
            experts=self.mesh.expert.size > 1 and any(map(ownership.is_expert, self.axis_of)),
            stages=self.mesh.pipeline.size > 1,
            replicas=replicated,
        )
        self.groups = make_buckets(self.parameters, self.axis_of, shard, values, bucket_elements, all_flat)
        self.buckets = [group for group in self.groups if isinstance(group, Bucket)]
        self._hooks: list[tuple[nn.Parameter, Callable[[nn.Parameter], None], RemovableHandle]] = []
        for bucket in self.buckets:
            if attach_grads:
                bucket.attaches = True
                continue
            for position, (_, parameter, _) in enumerate(bucket.parameters):
                hook = self._make_hook(bucket, position)
                self._hooks.append((parameter, hook, parameter.register_post_accumulate_grad_hook(hook)))
        self.parameters_of_groups: list[list[nn.Parameter]] = []
        """As the user gave them to the optimizer."""
        self.used: Sequence[bool] = ()
        """By number of the parameter, whether any process used it in the step that was put together last."""
        self.shards: dict[int, Shard] = {shard.number: shard for group in self.groups for shard in group.shards}
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._move_groups(names)
        self._device = self.parameters[0].parameter.device if self.parameters else torch.device("cpu")
        self._losses: list[tuple[Tensor, Tensor]] = []  # (mean, tokens) of the microbatches of this step
        self._syncing = False
        self._next = 0  # bucket to be launched next
        self.result: StepResult | None = None

    def _move_groups(self, names: Mapping[nn.Parameter, str]) -> None:
        """Put shards in the place of parameters; state that the optimizer already made moves along."""
        number = {parameter: index for _, parameter, index in self.parameters}
        state = self.optimizer.state
        self._numbering = Numbering([], {})
        self._group_sizes: list[int] = []
        count = 0
        for group in self.optimizer.param_groups:
            kept: list[nn.Parameter] = []
            self.parameters_of_groups.append(list(group["params"]))
            self._numbering.groups.append(list(range(count, count + len(group["params"]))))
            for place, parameter in enumerate(group["params"], start=count):
                if parameter not in number:
                    self._frozen.append((names.get(parameter, "a parameter"), parameter))
                    continue
                self._numbering.of_parameter[number[parameter]] = place
                old = state.pop(parameter, None)
                shard = self.shards.get(number[parameter])
                if shard is None:
                    continue  # another process updates all of it
                kept.append(shard.master)
                if old:
                    state[shard.master] = {key: _part(value, parameter, shard) for key, value in old.items()}
            count += len(group["params"])
            group["params"][:] = kept  # the list itself may be known elsewhere (LBFGS)
            self._group_sizes.append(len(kept))

    # ---------------------------------------------------------------------------------------------- backward

    def _make_hook(self, bucket: Bucket, position: int) -> Callable[[nn.Parameter], None]:
        def hook(_: nn.Parameter) -> None:
            bucket.collect(position)
            if self._syncing and bucket.waiting == 0 and self.overlap_reduce:
                self._launch_complete()

        return hook

    def collect_last(self) -> None:
        """Let hooks that others registered at parameters since be called while the gradient is there."""
        for place, (parameter, hook, handle) in enumerate(self._hooks):
            if not is_last_hook(parameter, handle):
                handle.remove()
                self._hooks[place] = (parameter, hook, parameter.register_post_accumulate_grad_hook(hook))

    def _launch_complete(self) -> None:
        """Reduce the buckets that are complete, in order: one that is not holds back those behind it."""
        while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
            self.buckets[self._next].launch()
            self._next += 1

    def begin_backward(self, sync: bool, factor: Tensor | None = None) -> None:
        """A backward pass starts.

        Args:
            sync: it is the last one of the optimizer step.
            factor: what its gradients are multiplied by, fp32 [].
        """
        self._syncing = sync
        self._next = 0
        for group in self.groups:
            group.begin_backward(factor)

    @property
    def own_tokens(self) -> Tensor:
        """Of this process in the step under way, fp64 []."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for _, tokens in self._losses:
            total += tokens
        return total

    @property
    def own_batches(self) -> int:
        """Of this process in the step under way."""
        return len(self._losses)

    def end_backward(self) -> None:
        """It is over."""
        for group in self.groups:
            group.end_backward()

    def add_loss(self, loss: Tensor, num_tokens: Tensor) -> None:
        """Count a microbatch.

        Args:
            loss: [], the mean that was back-propagated as a sum.
            num_tokens: [], what it is a mean over.
        """
        self._losses.append((loss.detach(), num_tokens.detach()))

    def finish_backward(self, asked: Sequence[bool] = ()) -> StepResult:
        """Put the gradients of the step together over all processes; collective.

        Args:
            asked: what this process asks for besides; as many on each.

        Returns:
            What every process now knows. The gradients are in the buckets, still sums.
        """
        for bucket in self.buckets[self._next :]:
            bucket.launch()
        self._next = len(self.buckets)
        self._syncing = False
        count = len(self.parameters)
        head = 4 + len(asked)
        facts = torch.zeros(head + count, dtype=torch.float64)
        flags = [False] * count
        for group in self.groups:
            for written, (_, _, index) in zip(group.written, group.parameters, strict=True):
                flags[index] = written
        facts[4:head] = torch.tensor(asked, dtype=torch.float64)
        facts[head:] = torch.tensor(flags, dtype=torch.float64)
        facts = facts.to(self._device)
        for loss, tokens in self._losses:
            facts[0] += tokens
            facts[1] += (loss.double() * tokens).sum()
            facts[2] += ~torch.isfinite(loss).all()
        for group in self.groups:
            if isinstance(group, Bucket):
                group.finish_reduction()
            facts[3] += group.sum_of_squares()
        self.mesh.data.all_reduce(facts)
        if self.mesh.pipeline.size > 1:
            facts[3:head] = self.mesh.pipeline.all_reduce(facts[3:head].clone())
        tokens, losses, bad, squares, *flags_of_all = facts.tolist()
        wanted, used = flags_of_all[: len(asked)], flags_of_all[len(asked) :]
        self.used = [flag > 0 for flag in used]
        self._divisor = tokens if tokens > 0 else 1.0  # no token at all: the gradients are zero anyway
        norm = self._norm(squares) / self._divisor
        self.result = StepResult(tokens, norm, int(bad), losses / self._divisor, tuple(flag > 0 for flag in wanted))
        self._losses = []
        return self.result

    def mean_norm(self) -> float:
        """Global norm of the gradients that the optimizer is going to use; collective."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for group in self.groups:
            squares += group.sum_of_squares()
        return self._norm(float(self.mesh.world.all_reduce(squares)))

    def _norm(self, squares: float) -> float:
        """From the sum of squares of all processes, which each of them knows; collective."""
        return squares**0.5 if LEAST_SQUARES <= squares < float("inf") else self._scaled_norm()

    def _scaled_norm(self) -> float:
        """The norm of gradients whose squares overflow or vanish; collective, as all processes found their sum so."""
        peak = torch.zeros((), dtype=torch.float64, device=self._device)
        for group in self.groups:
            peak = torch.maximum(peak, group.peak())
        largest = float(self.mesh.world.all_reduce(peak, ReduceOp.MAX))
        if largest in (0.0, float("inf")):
            return largest
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for group in self.groups:
            squares += group.sum_of_scaled_squares(peak)
        return largest * math.sqrt(self.mesh.world.all_reduce(squares))

    def assign_grads(self, max_norm: float | None = None) -> None:
        """Hand the mean gradients to the optimizer.

        Args:
            max_norm: clip to this global norm in the same multiplication.
        """
        assert self.result is not None
        scale = 1.0 / self._divisor
        if max_norm is not None:
            scale *= clip_coefficient(self.result.grad_norm, max_norm)
        for group in self.groups:
            group.assign_grads(self.used, factors(scale))

    def drop_grads(self) -> None:
        """Leave the optimizer nothing to do: a parameter without gradient is skipped, its state untouched."""
        for shard in self.shards.values():
            shard.master.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients that the optimizer is going to use, of this process' parts."""
        return [shard.master.grad for shard in self.shards.values() if shard.master.grad is not None]

    def non_finite_parameters(self) -> list[str]:
        """Names of parameters whose summed gradient is not finite in this process' part; costs a look at each."""
        names = []
        for group in self.groups:
            for position, (name, parameter, index) in enumerate(group.parameters):
                if isinstance(group, Unbucketed):
                    gradient = parameter.grad
                else:
                    shard = self.shards.get(index)
                    whole = group.grad_views[position].view(-1)
                    gradient = None if shard is None else whole[shard.start : shard.stop]
                if gradient is not None and not torch.isfinite(gradient).all():
                    names.append(name)
        return sorted(names)

    # ---------------------------------------------------------------------------------------------- step

    def begin_step(self) -> None:
        """Forget the gradients of the step that is over."""
        self.drop_grads()
        for bucket in self.buckets:
            bucket.begin_step()

    def trains(self, module: nn.Module) -> bool:
        """Whether its parameters are those of a module: the same one, which has not built them anew."""
        held = set(module.parameters())
        return self.ownership.module is module and all(parameter in held for _, parameter, _ in self.parameters)

    def check_groups(self) -> None:
        """Notice parameters that were added to the optimizer, or unfrozen, during the run.

        Raises:
            UserError: their number, or their names.
        """
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise UserError(
                f"{', '.join(thawed[:5])}{' ...' if len(thawed) > 5 else ''}: frozen when training began and not now; "
                "MoEStrategy shards the trained parameters once, so decide before fit which are frozen"
            )
        sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        if sizes != self._group_sizes:
            raise UserError(
                f"the optimizer's groups had {self._group_sizes} parameters when training began and have {sizes} now; "
                "MoEStrategy shards them once: give all parameters to the optimizer in configure_optimizers (callbacks "
                "that unfreeze layers later cannot be used)"
            )

    def start_gather(self) -> None:
        """Send the updated weights, those that the forward pass needs first ahead."""
        for bucket in reversed(self.buckets):
            bucket.start_gather()

    def publish(self) -> None:
        """Let the model have the weights that the optimizer has now; collective."""
        self.finish_gather()
        self.start_gather()
        self.finish_gather()

    def finish_gather(self) -> None:
        """Wait for all weights."""
        for bucket in reversed(self.buckets):
            bucket.finish_gather()

    def updated(self) -> dict[nn.Parameter, int]:
        """Elements of each parameter that this process updates."""
        sizes = {number: shard.stop - shard.start for number, shard in self.shards.items()}
        return {parameter: sizes.get(number, 0) for _, parameter, number in self.parameters}

    def bucket_of(self) -> dict[nn.Parameter, Bucket]:
        """The bucket of each parameter that has one."""
        return {parameter: bucket for bucket in self.buckets for _, parameter, _ in bucket.parameters}

    def adopt_weights(self) -> None:
        """Update from what was set at the parameters since the last step; the weights have arrived."""
        for bucket in self.buckets:
            bucket.adopt_weights()

    def values(self, shard: Shard) -> Tensor:
        """Of a shard, like its master: the optimizer's, and where something else was set at the parameter, that."""
        flat = self.parameters[shard.number].parameter.detach().reshape(-1)[shard.start : shard.stop]
        master = shard.master.detach()
        if flat.data_ptr() == master.data_ptr():
            return master
        flat = flat.view(master.shape)
        return master if torch.equal(flat, master.to(flat.dtype)) else adopted(flat, master)

    def close(self, connected: bool = True, widen: bool = False) -> None:
        """Let the module have its parameters back: in memory of their own, and without hooks.

        Args:
            connected: the other processes answer, and this is collective; else what they update stays as it came with
                the last weights.
            widen: let parameters narrower than their masters be fp32, with the masters' values.
        """
        self.closed = True
        for _, _, handle in self._hooks:
            handle.remove()
        self._hooks = []
        if connected:
            self.finish_gather()
        for bucket in self.buckets:
            bucket.release(connected, widen)

    def load_state(self, state: Mapping[nn.Parameter, dict[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer its state, as its own ``load_state_dict`` takes it.

        Args:
            state: entries by master.
            options: of each parameter group.
        """
        groups = self.optimizer.param_groups
        masters = [master for group in groups for master in group["params"]]
        number = {master: index for index, master in enumerate(masters)}
        self.optimizer.load_state_dict(
            {
                "state": {number[master]: entries for master, entries in state.items()},
                "param_groups": [
                    {**saved, "params": [number[master] for master in group["params"]]}
                    for saved, group in zip(options, groups, strict=True)
                ],
            }
        )

    def numbering(self) -> Numbering:
        """The parameters' numbers in the ``state_dict`` of the optimizer as the user made it."""
        return self._numbering

    # ---------------------------------------------------------------------------------------------- memory

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes that stay allocated between steps: weights, gradients, masters, optimizer state."""
        sizes = {"weights": 0, "grads": 0, "masters": 0, "state": 0}
        for group in self.groups:
            if isinstance(group, Bucket):
                sizes["weights"] += group.weights.nbytes
                sizes["grads"] += group.grads.nbytes
                if group.masters.dtype != group.weights.dtype:
                    sizes["masters"] += group.masters.nbytes
            else:
                sizes["weights"] += sum(parameter.nbytes for _, parameter, _ in group.parameters)
                sizes["grads"] += sum(parameter.nbytes for _, parameter, _ in group.parameters)
        for state in self.optimizer.state.values():
            sizes["state"] += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        return sizes

    def predicted_bytes(self) -> float:
        """The same for an optimizer with two fp32 moments: 6 + 12/D per bf16 parameter, 8 + 8/D per fp32 one."""
        total = 0.0
        for group in self.groups:
            ways = group.axis.size if isinstance(group, Bucket) and group.sharded else 1
            for _, parameter, _ in group.parameters:
                fixed, shared = (8, 8) if parameter.dtype == torch.float32 else (4 + parameter.element_size(), 12)
                total += parameter.numel() * (fixed + shared / ways)
        return total


def _part(value: Any, parameter: nn.Parameter, shard: Shard) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return value.reshape(-1)[shard.start : shard.stop].view(shard.master.shape).to(torch.float32).clone()
