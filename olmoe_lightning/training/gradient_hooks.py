"""Hooks of the user that look at gradients: when they find which, and when what they did is taken over.

=========================== ==========================================================================================
hook                        ``parameter.grad``
=========================== ==========================================================================================
on_after_backward           with the last batch of a step: of all processes, divided by the tokens of the step; before:
                            of this process so far, as a mean over what it will have had by the end of the step
on_before_optimizer_step    of all processes, divided
configure_gradient_clipping the same
on_before_zero_grad         of the step before, as the optimizer took it
=========================== ==========================================================================================

What they change in place, replace or set to ``None`` is what the optimizer gets. A norm of gradients of which this
process holds only a part (experts, stages) would be another one on each process: taking one is an error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage, nn

from olmoe_lightning._torch import TorchDispatchMode
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.grad_norm import clip_coefficient, factors
from olmoe_lightning.parallel.shown_gradients import ShownGradients

MODULE_HOOKS = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "on_before_zero_grad",
    "optimizer_step",
)
CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


class GradientHooks:
    """Shows gradients to hooks and takes them back, batch after batch.

    Args:
        shown: the gradients.
        batches: how many are accumulated in a step; asked at each batch.
        keeps: gradients of a step must be kept for ``on_before_zero_grad``, because those of the next one are made
            before it.
    """

    def __init__(self, shown: ShownGradients, batches: Callable[[], int], keeps: bool = False) -> None:
        self.shown = shown
        self._keeps = keeps
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._batches = batches
        self._open = ExitStack()
        self._own_norms = False  # the strategy computes one
        self.pending = False
        """Whether gradients are shown that the optimizer has not been given yet."""

    @contextmanager
    def after_backward(self, last: bool) -> Generator[None, None, None]:
        """Inside, ``on_after_backward`` is called."""
        if last:
            with self._watch():
                yield
            return
        sharded = self.shown.sharded
        expected = sharded.own_tokens * (self._batches() / max(sharded.own_batches, 1))
        expected = torch.where(expected > 0, expected, 1.0)
        self.shown.show_own(1.0 / expected)
        with self._watch():
            yield
        self.shown.take_own(expected)

    def show(self) -> None:
        """The gradients of a step are complete."""
        self.shown.show()
        self.pending = True

    def keep(self) -> None:
        """The gradients of the last step are about to be forgotten."""
        if self._keeps:
            trained = [named.parameter for named in self.shown.sharded.parameters]
            self._kept = [(each, each.grad.clone()) for each in trained if each.grad is not None]

    def show_kept(self) -> None:
        """``on_before_zero_grad`` comes next."""
        for parameter, gradient in self._kept:
            parameter.grad_dtype = None
            parameter.grad = gradient

    def drop_kept(self) -> None:
        """It was called."""
        for parameter, _ in self._kept:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
        self._kept = []

    def watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure; when it has returned, hooks are called until :meth:`take`."""

        def call() -> Any:
            result = closure()
            self._open.enter_context(self._watch())
            return result

        return call

    def clip_by_norm(self, max_norm: float) -> None:
        """Bring what is shown down to a global norm, which is that of the gradients as hooks left them; collective."""
        self._own_norms = True
        try:
            self.shown.take()
            for factor in factors(clip_coefficient(self.shown.sharded.mean_norm(), max_norm)):
                self.shown.scale(factor)
        finally:
            self._own_norms = False

    def clip_by_value(self, limit: float) -> None:
        """Bring every element of what is shown into ``[-limit, limit]``."""
        self.shown.take()
        self.shown.clamp(limit)

    def take(self) -> None:
        """The hooks have been called: what they left is the optimizer's."""
        self._open.close()
        self.shown.take()
        self.shown.end()
        self.pending = False

    def close(self) -> None:
        """Leave nothing open, whatever happened."""
        self._open.close()
        self.shown.end()
        self.pending = False

    @contextmanager
    def _watch(self) -> Generator[None, None, None]:
        partial = self.shown.partial_storages()
        if not partial:
            yield
            return
        with _NoPartialNorms(partial, lambda: self._own_norms):
            yield


_PICKS = {"index", "index_select", "gather", "take", "masked_select"}
"""Operators that may copy a single element, which is no sum over others."""


class _NoPartialNorms(TorchDispatchMode):
    """Stops what makes one number of a gradient of which there is only a part, or of what was computed from one.

    Args:
        storages: addresses of such gradients.
        allowed: whether it is the strategy that does so, which puts the parts together.
    """

    def __init__(self, storages: Iterable[int], allowed: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = set(storages)
        self._allowed = allowed
        self._derived: WeakValueDictionary[int, UntypedStorage] = WeakValueDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        partial = {_address(each): each.numel() for each in _tensors((args, kwargs)) if self._is_partial(each)}
        for output in _tensors(result) if partial and not self._allowed() else ():
            if not output.is_floating_point() or _address(output) in partial:  # a view, or changed in place
                continue
            if output.numel() == 1 < max(partial.values()) and func.overloadpacket.__name__ not in _PICKS:
                raise UserError(
                    f"{_hook_under_way()} makes one number of gradients of which this process holds only a part, and "
                    "each process would get another one; take trainer.strategy.grad_norm for their global norm, and "
                    "self.clip_gradients(...) or Trainer(gradient_clip_val=...) to clip by it"
                )
            self._derived[_address(output)] = output.untyped_storage()
        return result

    def _is_partial(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._storages or _address(tensor) in self._derived


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[Tensor]:
    """Those in arguments or results of an operator."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    return [found for value in values for found in _tensors(value)] if isinstance(values, list | tuple) else []


def _hook_under_way() -> str:
    """Class and name of the hook that is called now."""
    for frame, _ in traceback.walk_stack(None):
        owner, name = frame.f_locals.get("self"), frame.f_code.co_name
        if name in MODULE_HOOKS:
            return f"{type(owner).__name__}.{name}"
    return "a hook"
