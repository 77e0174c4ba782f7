"""One optimizer step: forward and backward passes of its batches, the decision at their end, and the update.

Lightning calls, for each batch, ``training_step`` and then ``backward``; with the last batch of a step the gradients of
all are put together, and the optimizer updates. A pipeline makes its gradients inside of ``training_step`` already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from olmoe_lightning._torch import foreach_mul_
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel.grad_norm import clip_coefficient, factors
from olmoe_lightning.parallel.layout import Views
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer, StepResult
from olmoe_lightning.parallel.weight_waits import WeightWaits
from olmoe_lightning.training.gradient_hooks import GradientHooks
from olmoe_lightning.training.loss_graph import attaches_losses
from olmoe_lightning.training.objective import read_output


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite, and the strategy was told to stop at that."""


class _Skipped(Exception):
    """Ends the optimizer's step before it has changed anything."""


@dataclass(frozen=True)
class Run:
    """What the steps of one ``fit`` work with.

    Args:
        sharded: the optimizer's mechanics.
        waits: weights that may arrive during the next forward pass.
        views: tensors of the module that look at the memory of parameters.
        gather_at_once: weights must be there when the step ends, because something may read them before that.
        max_norm: the norm to clip to in the same multiplication as the division, ``None`` where something looks at the
            gradients in between; asked at each step.
        hooks: shows gradients to the user's hooks, if there are any.
        third_parties: something of the user's may set weights or register hooks at them between two steps.
        before_update: called when the optimizer is about to change its parameters and state.
        global_step: number of the step, for messages.
        noted: what signals have asked this process for; all processes learn of it with the step's decision.
    """

    sharded: ShardedOptimizer
    waits: WeightWaits
    views: Views
    gather_at_once: bool
    max_norm: Callable[[], float | None]
    hooks: GradientHooks | None
    third_parties: bool
    before_update: Callable[[], None]
    global_step: Callable[[], int]
    noted: Callable[[], Sequence[bool]]


class OptimizerStep:
    """The step under way, and what is known of the last one.

    Args:
        on_non_finite: see :class:`~olmoe_lightning.MoEStrategy`.

    Raises:
        UserError: it is neither ``skip`` nor ``raise``.
    """

    def __init__(self, on_non_finite: Literal["skip", "raise"]) -> None:
        if on_non_finite not in ("skip", "raise"):
            raise UserError(f"on_non_finite ({on_non_finite!r}) must be 'skip' or 'raise'")
        self.on_non_finite: Literal["skip", "raise"] = on_non_finite
        self.run: Run | None = None
        """Of the fit under way, or of the last one until the next."""
        self.grad_norm: float | None = None
        """Global norm of the last step's mean gradient, before clipping; the same on all processes."""
        self.skipped = False
        """Whether the last step was skipped."""
        self.skipped_steps = 0
        """Steps that were skipped because something was not finite."""
        self._taken = self._refused = 0  # steps of this run
        self._last_batch = True  # of the step; else gradients stay here
        self._open = False  # it has begun
        self._gradients_made = False  # of this batch, by the schedule of a pipeline
        self._staged_loss: Tensor | None = None  # what it has differentiated
        self._loss: Tensor | None = None  # of this batch, to be differentiated
        self._factor: Tensor | None = None  # of its gradients, where the loss is no sum
        self._clipped = False
        self._asked: tuple[bool, ...] | None = None  # of any process, at the end of the last step
        self._batches = 0  # of this process in it
        self._calls = 0  # of the closure in the optimizer step under way

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """The optimizer's mechanics."""
        return self.run.sharded if self.run is not None else None

    @property
    def shows_gradients(self) -> bool:
        """Whether hooks of the user look at gradients."""
        return self.run is not None and self.run.hooks is not None

    @property
    def skipped_all(self) -> bool:
        """Whether this run, or the last one, has skipped each of its steps."""
        return self._refused > 0 and not self._taken

    def begin_run(self, run: Run) -> None:
        """A fit starts."""
        self.run = run
        self._open, self._loss = False, None
        self._taken = self._refused = 0

    def close_run(self, interrupted: bool = False, restore_masters: bool = False) -> None:
        """The fit is over; the optimizer can still be saved, and the module's parameters are on their own.

        Args:
            interrupted: the others may be gone, so that nothing can be waited for.
            restore_masters: let the module leave with its fp32 masters, so that a second fit does not start from
                rounded weights.
        """
        if self.run is None or self.run.sharded.closed:
            return
        self.run.waits.close()
        if self.run.hooks is not None:
            self.run.hooks.close()
        self.run.sharded.close(not interrupted, restore_masters)
        self.run.views.follow()

    def forget_run(self) -> None:
        """Give its optimizer up."""
        self.close_run()
        self.run = None

    # ---------------------------------------------------------------------------------------------- one batch

    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Inside, batches are not the last ones of the step."""
        self._last_batch = False
        try:
            yield
        finally:
            self._last_batch = True

    def begin_forward(self) -> None:
        """``training_step`` is about to be called."""
        self._gradients_made, self._staged_loss = False, None
        if self.run is not None:
            self.run.waits.begin_forward()

    def begin_pipeline(self) -> None:
        """The schedule of a pipeline is about to make gradients, inside of ``training_step``."""
        self._gradients_made = True
        if self.run is not None and self.run.hooks is not None and not self._open:
            self.run.hooks.keep()
        self._begin_backward(sync=False)

    def end_pipeline(self, loss: Tensor) -> None:
        """It has made them, of this sum. Lightning forgets gradients only now: those of the last step."""
        self._staged_loss = loss if self._staged_loss is None else self._staged_loss + loss
        if self.run is not None:
            self.run.sharded.end_backward()
            if self.run.hooks is not None:
                self.run.hooks.show_kept()

    def end_forward(self, output: Any, module: str, staged: bool) -> None:
        """``training_step`` has returned.

        Args:
            output: what it returned.
            module: name of the module's class.
            staged: whether the module is cut into stages.

        Raises:
            RuntimeError: it is, but the batch did not pass through them.
            UserError: the number of tokens would be rounded.
        """
        if self.run is None:
            return
        found = read_output(output)
        if found is None:  # Lightning raises, or skips the batch
            if self._last_batch and self._open:
                self._begin_backward(sync=True)
                self._finish(self.run)
            return
        if staged and not self._gradients_made:
            raise RuntimeError(
                f"{module}.training_step did not call self.trainer.strategy.pipeline_step, so that the stages made no "
                "gradients"
            )
        if self._staged_loss is not None and not found.counted:
            differentiated, returned = self._staged_loss.item(), found.loss.item()
            if not math.isclose(differentiated, returned, rel_tol=1e-3, abs_tol=1e-6) and math.isfinite(returned):
                raise UserError(
                    f"{module}.training_step returned the loss {returned:.6g} without 'num_tokens', but the pipeline "
                    f"has differentiated the sum {differentiated:.6g}: return {{'loss': sums['loss'] / "
                    "sums['num_tokens'], 'num_tokens': sums['num_tokens']} of what pipeline_step returned"
                )
        self._loss, self._factor = found.differentiated()
        if self._factor is not None and not self._gradients_made and attaches_losses(found.loss):
            raise UserError(
                f"the gradient of {module}'s loss passes through bfloat16 or float16, where the number of tokens "
                "would be rounded, and its layers attach losses of their own, which are sums over tokens: compute the "
                "loss in float32 (logits.float() before the loss function, not loss.float() behind it)"
            )
        self.run.sharded.add_loss(found.loss, found.num_tokens)

    def begin_backward(self) -> bool:
        """``backward`` is about to be called; whether its gradients are of this step."""
        if self.run is None or self._loss is None:
            return False
        if self.run.hooks is not None:
            self.run.hooks.drop_kept()
        if not self._gradients_made:
            self._begin_backward(self._last_batch, self._factor)
        return True

    def take_loss(self) -> Tensor | None:
        """What is to be differentiated, a sum over tokens; ``None`` if a pipeline has done it."""
        loss, self._loss = self._loss, None
        return None if self._gradients_made else loss

    @contextmanager
    def end_backward(self) -> Generator[None, None, None]:
        """The gradients of a batch are there; with those of the last one the step is decided.

        Inside, ``on_after_backward`` is called.
        """
        assert self.run is not None
        self.run.waits.end_backward()
        if not self._gradients_made:
            self.run.sharded.end_backward()
        if self._last_batch:
            self._finish(self.run)
        if self.run.hooks is None:
            yield
        else:
            with self.run.hooks.after_backward(self._last_batch):
                yield

    def _begin_backward(self, sync: bool, factor: Tensor | None = None) -> None:
        if self.run is None:
            return
        if not self._open:
            self.run.sharded.begin_step()
            if self.run.third_parties:
                self.run.sharded.collect_last()
            self._open = True
        self.run.sharded.begin_backward(sync, factor)

    # ---------------------------------------------------------------------------------------------- the decision

    def _finish(self, run: Run) -> None:
        """Put the gradients of all processes together; all take the same decision."""
        self._open = False
        self._batches = run.sharded.own_batches
        result = run.sharded.finish_backward(run.noted())
        self._asked = result.asked
        run.before_update()
        if run.hooks is None:
            self._decide(run, result)
            return
        self.grad_norm, self.skipped, self._clipped = result.grad_norm, not result.finite, False
        run.sharded.assign_grads()
        run.hooks.show()

    def end_hooks(self) -> None:
        """The user's hooks have seen the gradients, and the optimizer is next: it gets what they left, or nothing."""
        if self.run is None:
            return
        if self.run.hooks is not None and self.run.hooks.pending:
            self.run.hooks.take()
            result = self.run.sharded.result
            assert result is not None
            self._decide(self.run, replace(result, grad_norm=self.run.sharded.mean_norm()), shown=True)
        if self.skipped and self._calls:
            raise _Skipped

    def _decide(self, run: Run, result: StepResult, shown: bool = False) -> None:
        self.grad_norm = self.grad_norm if shown else result.grad_norm
        self.skipped = not result.finite
        if self.skipped:
            self._refuse(run, result)
            run.sharded.drop_grads()
            return
        self._taken += 1
        if run.third_parties:
            run.sharded.adopt_weights()
        if not shown:
            max_norm = run.max_norm()
            self._clipped = max_norm is not None
            run.sharded.assign_grads(max_norm)

    def _refuse(self, run: Run, result: StepResult) -> None:
        what = (
            f"the loss of {result.bad_losses} microbatches was not finite"
            if result.bad_losses
            else f"the global gradient norm is {result.grad_norm}"
        )
        if self.on_non_finite == "raise" or self._calls > 1:
            bad = run.sharded.non_finite_parameters()
            found = f"; not finite on {run.sharded.mesh}: {', '.join(bad[:5]) or 'nothing'}"
            done = (
                f"It was call {self._calls} of the closure, so that the optimizer has begun to change weights and the "
                "step cannot be skipped."
                if self._calls > 1
                else "Nothing was changed by it."
            )
            raise NonFiniteError(f"optimizer step {run.global_step()}: {what}{found}. {done}")
        self.skipped_steps += 1
        self._refused += 1
        rank_zero_warn(
            f"Skipped optimizer step {run.global_step()} ({self.skipped_steps} in all): {what}. Weights, optimizer, "
            "schedule and router biases are as before it."
        )

    def take_asked(self) -> tuple[bool, ...] | None:
        """What signals had asked any process for at the end of the last step; ``None`` if that was taken already."""
        asked, self._asked = self._asked, None
        return asked

    # ---------------------------------------------------------------------------------------------- the update

    @torch.no_grad()
    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Bring the gradients down to a global norm; in place of the method of Lightning's precision plugins."""
        if self.run is None or self._clipped or self.grad_norm is None:
            return
        if self.run.hooks is not None:
            self.run.hooks.clip_by_norm(clip_val)
        elif not self.skipped:
            for factor in factors(clip_coefficient(self.grad_norm, clip_val)):
                foreach_mul_(self.run.sharded.gradients(), factor)

    @torch.no_grad()
    def clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Bring every gradient into ``[-clip_val, clip_val]``; likewise."""
        if self.run is not None and self.run.hooks is not None:
            self.run.hooks.clip_by_value(clip_val)
        elif self.run is not None:
            for gradient in self.run.sharded.gradients():
                gradient.clamp_(-clip_val, clip_val)

    @contextmanager
    def watched(self, closure: Callable[[], Any]) -> Generator[Callable[[], Any], None, None]:
        """What to call in the place of an optimizer's closure while the optimizer steps.

        It may be called several times, with other weights each time, and returns the same number on all processes.
        """
        if self.run is None:
            yield closure
            return
        run, self._calls = self.run, 0
        evaluate = closure if run.hooks is None else run.hooks.watched(closure)

        def call() -> Any:
            self._calls += 1
            if self._calls > 1:
                self._evaluate_again(run)
            loss = evaluate()
            joined = run.sharded.result
            return loss if joined is None or not isinstance(loss, Tensor) else torch.full_like(loss, joined.loss)

        try:
            yield call
        except _Skipped:
            pass
        finally:
            self._calls = 0
            if run.hooks is not None:
                run.hooks.close()

    def _evaluate_again(self, run: Run) -> None:
        """The optimizer has changed its part, and wants loss and gradients with that."""
        kind = type(run.sharded.optimizer).__name__
        if self._batches > 1:
            raise UserError(
                f"{kind} calls its closure more than once in a step, but of the {self._batches} batches that are "
                "accumulated only the last one can be computed again; set accumulate_grad_batches=1"
            )
        run.sharded.publish()

    def after_update(self) -> None:
        """The optimizer has updated its part, or left it alone if the step was skipped."""
        if self.run is None:
            return
        self.run.sharded.check_groups()
        if not self.skipped:
            self.run.sharded.start_gather()
            if self.run.gather_at_once:
                self.run.sharded.finish_gather()

    def wait_for_weights(self) -> None:
        """Return when the weights of the last step have arrived from the other processes."""
        if self.run is not None:
            self.run.sharded.finish_gather()
