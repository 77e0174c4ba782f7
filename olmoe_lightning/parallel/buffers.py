"""Parameters that are replicated over the same processes, laid end to end: one reduction and one gather per bucket.

A bucket owns three flat tensors of n elements, n divisible by the D processes that share it:

- ``weights`` in the parameters' dtype: the parameters become views of it;
- ``grads`` in fp32, whatever the dtype of the weights: gradients of microbatches are added there;
- ``masters`` in fp32, of n/D elements (n without sharding): what the optimizer updates. For fp32 weights it is a view
  of them, so that it costs nothing.

Bytes per parameter with AdamW: 2 + 4 + 12/D in bf16, 4 + 4 + 8/D in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from olmoe_lightning._torch import foreach_mul_, version
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.collectives import Pending, all_gather, all_reduce, reduce_scatter
from olmoe_lightning.parallel.grad_norm import peak, sum_of_scaled_squares, sum_of_squares
from olmoe_lightning.parallel.mesh import Axis

BUCKET_ELEMENTS = 4 * 2**20
"""Elements of a bucket unless a parameter is larger: 16 MiB of gradients, large for a network, small beside a model."""

_ALIGNMENT = 32  # elements; parameters start at multiples of it, so that views stay aligned for vector loads


Flags = Sequence[bool] | Mapping[int, bool]
"""By number of the parameter."""


class NamedParameter(NamedTuple):
    """A parameter, the name it has in the module, and its number among all that are trained."""

    name: str
    parameter: nn.Parameter
    number: int


class Shard(NamedTuple):
    """The part of a parameter that this process updates."""

    number: int
    """Number of the parameter."""
    start: int
    """First element, in the flattened local parameter."""
    stop: int
    master: nn.Parameter
    """fp32; flat, or of the parameter's shape where nothing is sharded or it has no dimensions."""


class Bucket:
    """Parameters of one dtype that are replicated over one axis.

    Args:
        parameters: in the order of the backward pass.
        axis: the processes that hold the same values.
        sharded: whether each of them updates its own part only.
        values: fp32 values by parameter where they are known more exactly than the parameter holds them.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        axis: Axis,
        sharded: bool,
        values: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.axis = axis
        self.sharded = sharded and axis.size > 1
        first = parameters[0].parameter
        self.starts: list[int] = []
        length = 0
        for _, parameter, _ in parameters:
            self.starts.append(length)
            length += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        length = -(-length // (axis.size * _ALIGNMENT)) * axis.size * _ALIGNMENT
        self.weights = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(length, dtype=torch.float32, device=first.device)
        self.masters = self.own(self.weights)
        if first.dtype != torch.float32:
            self.masters = torch.zeros(self.masters.shape, dtype=torch.float32, device=first.device)
        self.grad_views: list[Tensor] = []
        self.weight_views: list[Tensor] = []
        self.shards: list[Shard] = []
        self._master_views: list[Tensor] = []
        lower = self.axis.rank * (length // self.axis.size) if self.sharded else 0
        upper = lower + self.masters.numel()
        for start, (_, parameter, index) in zip(self.starts, parameters, strict=True):
            stop = start + parameter.numel()
            value = parameter.detach() if values is None else values.get(parameter, parameter.detach())
            # `.data`, so that each counts its own writes and not those to all of the buffer.
            self.grad_views.append(self.grads[start:stop].view(parameter.shape).data)
            view = self.weights[start:stop].view(parameter.shape)
            view.copy_(value)
            self.weight_views.append(view)
            parameter.data = view
            begin, end = max(start, lower), min(stop, upper)
            if begin < end:
                master = self.masters[begin - lower : end - lower]
                if first.dtype != torch.float32:
                    master.copy_(value.reshape(-1)[begin - start : end - start])
                if not self.sharded or not parameter.ndim:
                    master = master.view(parameter.shape)
                self._master_views.append(master)
                self.shards.append(Shard(index, begin - start, end - start, nn.Parameter(master)))
        self.attaches = False
        """Whether something else than the autograd engine adds to gradients, so that no hook collects them."""
        self.shown = False  # parameters have gradients, for hooks to look at
        self._versions: list[int] = []  # of the views when they were attached
        self.written = [False] * len(parameters)  # in this optimizer step
        self.waiting = 0  # parameters whose gradient this backward pass still owes
        self.launched = False
        self._factor: Tensor | None = None
        self._reduction = Pending()
        self._gather = Pending()
        self._gradients = Pending()

    def own(self, flat: Tensor) -> Tensor:
        """The part of a flat tensor that this process updates."""
        return flat.chunk(self.axis.size)[self.axis.rank] if self.sharded else flat

    # ---------------------------------------------------------------------------------------------- gradients

    def _attach(self) -> None:
        """Let ``parameter.grad`` be the buffer: whoever adds to it, adds in fp32. Nothing is collected then."""
        for (_, parameter, _), view in zip(self.parameters, self.grad_views, strict=True):
            if parameter.dtype != torch.float32:
                parameter.grad_dtype = torch.float32
            parameter.grad = view
        self._versions = [version(view) for view in self.grad_views]

    def end_backward(self) -> None:
        """Where gradients were attached, see which parameters got any: zeros that were added are a gradient too."""
        if not self.attaches:
            return
        now = [version(view) for view in self.grad_views]
        known = zip(self.written, now, self._versions, strict=True)
        self.written = [had or after > before for had, after, before in known]
        self._hide()

    def begin_backward(self, factor: Tensor | None = None) -> None:
        """A backward pass starts: every parameter may bring a gradient.

        Args:
            factor: what each is multiplied by, fp32 []; not where gradients are attached.
        """
        self.waiting = len(self.parameters)
        self._factor = factor
        self.launched = False
        if self.attaches:
            self._attach()

    def collect(self, position: int) -> None:
        """Take over the gradient that the backward pass has just left at a parameter, and free it there."""
        name, parameter, _ = self.parameters[position]
        if self.launched:
            raise RuntimeError(
                f"the gradient of {name} arrived twice in one backward pass, after it had been sent to the other "
                "processes (reentrant checkpointing does this); set MoEStrategy(overlap_grad_reduce=False)"
            )
        self.waiting -= 1
        if parameter.grad is None:  # a hook of the user took it
            return
        if parameter.grad.is_sparse:
            raise UserError(f"the gradient of {name} is sparse, which cannot be summed in buckets; set sparse=False")
        view, gradient = self.grad_views[position], parameter.grad
        if self._factor is not None:
            gradient = gradient.float() * self._factor
        if self.written[position]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.written[position] = True
        parameter.grad = None

    def launch(self) -> None:
        """Start summing the gradients over the axis."""
        self.launched = True
        for written, view in zip(self.written, self.grad_views, strict=True):
            if not written:
                view.zero_()  # not used in this step, or a leftover of the last one
        self._reduction = (reduce_scatter if self.sharded else all_reduce)(self.axis, self.grads)

    def finish_reduction(self) -> None:
        """Wait for the sums; they are complete in the own part only."""
        self._reduction.wait()
        self._gather.wait()  # of the last step, if the layer was not called since: the masters are about to change

    def sum_of_squares(self) -> Tensor:
        """Of the summed gradients, each element once in the whole mesh, fp64 []."""
        return sum_of_squares(self._once())

    def peak(self) -> Tensor:
        """Their largest magnitude, fp64 []."""
        return peak(self._once())

    def sum_of_scaled_squares(self, scale: Tensor) -> Tensor:
        """As :meth:`sum_of_squares`, of the gradients divided by ``scale``."""
        return sum_of_scaled_squares(self._once(), scale)

    def _once(self) -> Tensor:
        """The summed gradients, each element on one process only."""
        return self.grads.chunk(self.axis.size)[self.axis.rank]

    def assign_grads(self, used: Flags, scales: Sequence[float]) -> None:
        """Give the shards their gradients, times ``scales``; a parameter that no process used gets none.

        Args:
            used: by number of the parameter.
            scales: see :func:`~olmoe_lightning.parallel.grad_norm.factors`.
        """
        own = self.own(self.grads)
        for scale in scales:
            own.mul_(scale)
        self._give_shards(used)

    def _give_shards(self, used: Flags) -> None:
        own = self.own(self.grads)
        lower = self.axis.rank * own.numel() if self.sharded else 0
        starts = {named.number: start for named, start in zip(self.parameters, self.starts, strict=True)}
        for index, start, stop, master in self.shards:
            begin = starts[index] - lower
            master.grad = own[begin + start : begin + stop].view(master.shape) if used[index] else None

    # ---------------------------------------------------------------------------------------------- for hooks

    def show_own(self, scale: Tensor) -> None:
        """Let ``parameter.grad`` be what was added up here so far, times ``scale``, while hooks look at it."""
        self.grads.mul_(scale)
        self._show(self.written)

    def take_own(self, scale: Tensor) -> None:
        """Go on with what the hooks left, times ``scale``; a gradient that they removed was never there."""
        self.written = self._take()
        self.grads.mul_(scale)
        self._hide()

    def start_show(self) -> None:
        """Let the reduced gradients, which each process of the axis has a part of, come together."""
        if self.sharded:
            self._gradients = all_gather(self.axis, self.grads)

    def show(self, used: Flags) -> None:
        """Let ``parameter.grad`` be the gradient, and ``None`` where no process used the parameter.

        Args:
            used: by number of the parameter.
        """
        self._gradients.wait()
        self._show([used[named.number] for named in self.parameters])

    def take(self) -> None:
        """Give the shards what hooks left of the gradients."""
        left = self._take()
        self._give_shards({named.number: there for named, there in zip(self.parameters, left, strict=True)})

    def _show(self, there: Sequence[bool]) -> None:
        self.shown = True
        for (_, parameter, _), view, has in zip(self.parameters, self.grad_views, there, strict=True):
            if parameter.dtype != torch.float32:
                parameter.grad = None
                parameter.grad_dtype = None  # any: a hook may put one in the dtype of the parameter there
            parameter.grad = view if has else None

    def _take(self) -> list[bool]:
        """Copy what was replaced into the buffer; which parameters have a gradient."""
        for (_, parameter, _), view in zip(self.parameters, self.grad_views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
                parameter.grad = view
        return [named.parameter.grad is not None for named in self.parameters]

    def _hide(self) -> None:
        self.shown = False
        for _, parameter, _ in self.parameters:
            parameter.grad = None
            if parameter.dtype != torch.float32:
                parameter.grad_dtype = parameter.dtype

    def begin_step(self) -> None:
        """Forget the gradients of the step that is over."""
        if self.shown:
            self._hide()
        self.written = [False] * len(self.parameters)
        if self.attaches:
            self.grads.zero_()

    # ---------------------------------------------------------------------------------------------- weights

    def adopt_weights(self) -> None:
        """Train on from what was set at the parameters: in place, or as another tensor in the place of the bucket's.

        Raises:
            UserError: a parameter has another shape now.
        """
        for (name, parameter, _), view in zip(self.parameters, self.weight_views, strict=True):
            if parameter.shape != view.shape:
                raise UserError(
                    f"{name} has the shape {list(parameter.shape)}, and had {list(view.shape)} when training began; "
                    "MoEStrategy shards parameters once, so change shapes before fit"
                )
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                view.copy_(parameter.detach())
                parameter.data = view
        if self.masters.dtype != self.weights.dtype:
            adopted(self.own(self.weights), self.masters, out=self.masters)

    def start_gather(self) -> None:
        """Send the updated part to the others and start receiving theirs."""
        for (_, _, _, master), view in zip(self.shards, self._master_views, strict=True):
            if master.data_ptr() != view.data_ptr():  # the optimizer has put another tensor there
                view.copy_(master.detach())
                master.data = view
        if self.masters.dtype != self.weights.dtype:
            self.own(self.weights).copy_(self.masters)
        if self.sharded:
            self._gather = all_gather(self.axis, self.weights)

    def finish_gather(self) -> None:
        """Wait until the weights are those of after the step."""
        self._gather.wait()

    def release(self, connected: bool, widen: bool) -> None:
        """Give each parameter memory of its own, and nothing of this bucket.

        Args:
            connected: the other processes answer, and this is collective.
            widen: let parameters narrower than their masters be fp32, exact where nothing else was set at them.
        """
        exact = None
        if widen and self.masters.dtype != self.weights.dtype:
            exact = self.weights.float()
            self.own(exact).copy_(self.masters)
            if self.sharded and connected:
                all_gather(self.axis, exact).wait()
        for position, (start, (_, parameter, _)) in enumerate(zip(self.starts, self.parameters, strict=True)):
            if parameter.grad is not None and parameter.grad.data_ptr() == self.grad_views[position].data_ptr():
                parameter.grad = None
            view, value = self.weight_views[position], parameter.detach()
            if exact is not None and value.shape == view.shape:
                parameter.data = adopted(value, exact[start : start + view.numel()].view(view.shape))
            elif value.data_ptr() == view.data_ptr():
                parameter.data = value.clone()
            if parameter.grad is None:
                parameter.grad_dtype = parameter.dtype


def adopted(weights: Tensor, exact: Tensor, out: Tensor | None = None) -> Tensor:
    """fp32 values of weights: the exact ones where the weights are their rounded values, else what was set there.

    Args:
        weights: in any dtype.
        exact: fp32, of the same shape; a new tensor is made unless ``out`` is given.
        out: may be ``exact``.
    """
    unchanged = weights == exact.to(weights.dtype)
    return torch.where(unchanged, exact, weights.to(torch.float32), out=out)


class Unbucketed:
    """fp32 parameters that no other process holds: they stay where they are, gradients and all."""

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self.parameters = list(parameters)
        self.shards = [Shard(index, 0, parameter.numel(), parameter) for _, parameter, index in parameters]
        self._factor: Tensor | None = None
        self._before: list[Tensor | None] = []

    @property
    def written(self) -> list[bool]:
        """Which parameters have a gradient in this step."""
        return [parameter.grad is not None for _, parameter, _ in self.parameters]

    def begin_backward(self, factor: Tensor | None = None) -> None:
        """A backward pass starts.

        Args:
            factor: what its gradients are multiplied by, fp32 [].
        """
        self._factor = factor
        if factor is not None:
            self._before = [parameter.grad for _, parameter, _ in self.parameters]
            for _, parameter, _ in self.parameters:
                parameter.grad = None

    def end_backward(self) -> None:
        """It is over."""
        if self._factor is None:
            return
        for (_, parameter, _), before in zip(self.parameters, self._before, strict=True):
            if parameter.grad is None:
                parameter.grad = before
                continue
            parameter.grad.mul_(self._factor)
            if before is not None:
                parameter.grad.add_(before)
        self._factor, self._before = None, []

    def sum_of_squares(self) -> Tensor:
        """Of the gradients, fp64 []."""
        device = self.parameters[0].parameter.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in self._gradients():
            total += sum_of_squares(gradient)
        return total

    def peak(self) -> Tensor:
        """Their largest magnitude, fp64 []."""
        peaks = [peak(gradient) for gradient in self._gradients()]
        device = self.parameters[0].parameter.device
        return torch.stack(peaks).amax() if peaks else torch.zeros((), dtype=torch.float64, device=device)

    def sum_of_scaled_squares(self, scale: Tensor) -> Tensor:
        """As :meth:`sum_of_squares`, of the gradients divided by ``scale``."""
        total = torch.zeros_like(scale)
        for gradient in self._gradients():
            total += sum_of_scaled_squares(gradient, scale)
        return total

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad.contiguous() for _, parameter, _ in self.parameters if parameter.grad is not None]

    def assign_grads(self, used: Flags, scales: Sequence[float]) -> None:
        """Scale the gradients; one that another shard of the same parameter got is zero here, not missing."""
        grads = []
        for _, parameter, index in self.parameters:
            if parameter.grad is None and used[index]:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad is not None:
                grads.append(parameter.grad)
        for scale in scales:
            foreach_mul_(grads, scale)

    def show_own(self, scale: Tensor) -> None:
        """Let gradients be those of so far, times ``scale``, while hooks look at them."""
        foreach_mul_([p.grad for _, p, _ in self.parameters if p.grad is not None], scale)

    take_own = show_own


def stays(
    parameter: nn.Parameter, axis: Axis, values: Mapping[nn.Parameter, Tensor] | None = None, all_flat: bool = False
) -> bool:
    """Whether the optimizer is to update the parameter itself; arguments as of :func:`make_buckets`."""
    exact = parameter.dtype == torch.float32 and not (values and parameter in values)
    return exact and not all_flat and axis.size == 1


def make_buckets(
    parameters: Sequence[NamedParameter],
    axis_of: Mapping[nn.Parameter, Axis],
    sharded: bool,
    values: Mapping[nn.Parameter, Tensor] | None = None,
    limit: int = BUCKET_ELEMENTS,
    all_flat: bool = False,
) -> list[Bucket | Unbucketed]:
    """Distribute parameters over buckets, last parameter first: so the backward pass fills them one after another.

    Args:
        parameters: in the order of the forward pass, each once.
        axis_of: the processes that hold the same values of a parameter.
        sharded: see :class:`Bucket`.
        values: see :class:`Bucket`.
        limit: elements at which a bucket is full.
        all_flat: no parameter stays where it is.
    """
    unbucketed: list[NamedParameter] = []
    groups: list[tuple[Axis, list[NamedParameter]]] = []
    open_groups: dict[object, int] = {}
    sizes: dict[int, int] = {}
    for named in reversed(parameters):
        parameter = named.parameter
        axis = axis_of[parameter]
        if stays(parameter, axis, values, all_flat):
            unbucketed.append(named)
            continue
        key = (axis.name, parameter.dtype, parameter.device)
        place = open_groups.get(key)
        if place is None or sizes[place] + parameter.numel() > limit:
            place = open_groups[key] = len(groups)
            groups.append((axis, []))
            sizes[place] = 0
        groups[place][1].append(named)
        sizes[place] += parameter.numel()
    buckets: list[Bucket | Unbucketed] = [Bucket(members, axis, sharded, values) for axis, members in groups]
    return [*buckets, Unbucketed(unbucketed)] if unbucketed else buckets
