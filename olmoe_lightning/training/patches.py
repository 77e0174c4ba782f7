"""Methods of Lightning's objects that are replaced during a run, and given back at its end: all of them, here.

Lightning has no hook for these: what clips in a precision plugin, what comes between the last hook that sees gradients
and the optimizer, what swaps weights in an optimizer, what advances an lr_schedule in a module, what asks whether a
file exists in a ``ModelCheckpoint``, what handles signals, what a search for a learning rate leaves to its schedule,
and a moment behind all other ends of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateFinder
from lightning.pytorch.plugins.precision import Precision

from olmoe_lightning._lightning import REQUEUE_HANDLER, SIGTERM_BROADCAST, SIGTERM_HANDLER, signal_connector_of

_OF_CLASS = object()
"""In the place of a method that the instance had not replaced itself."""
_SAVING_HOOKS = (
    "on_train_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_exception",
)


class Patches:
    """Replaced methods: set on the instance, not on its class."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _OF_CLASS)))
        setattr(owner, name, method)

    def clip(self, precision: Precision, by_norm: Callable[..., None], by_value: Callable[..., None]) -> None:
        """``Trainer(gradient_clip_val=...)`` ends in these two, of stock and custom plugins alike."""
        self._replace(precision, "clip_grad_by_norm", by_norm)
        self._replace(precision, "clip_grad_by_value", by_value)

    def after_gradient_hooks(self, module: LightningModule, then: Callable[[], None]) -> None:
        """Call something after ``configure_gradient_clipping``, which is called last, clipping or not.

        Args:
            module: whose hook it is.
            then: gets the gradients that all hooks have left.
        """
        configure = module.configure_gradient_clipping

        def configure_gradient_clipping(*args: Any, **kwargs: Any) -> None:
            configure(*args, **kwargs)
            then()

        self._replace(module, "configure_gradient_clipping", configure_gradient_clipping)

    def around_swaps(self, optimizers: Sequence[Any], first: Callable[[], None], then: Callable[[], None]) -> None:
        """Call something before and after an optimizer puts other weights at its parameters, to evaluate or to train.

        Args:
            optimizers: the optimizer, and Lightning's wrapper of it, which has the same methods.
            first: returns when the weights may change.
            then: gets them to the model.
        """
        for optimizer in optimizers:
            for name in ("train", "eval"):
                if callable(method := getattr(optimizer, name, None)):

                    def switch(*args: Any, method: Callable[..., Any] = method, **kwargs: Any) -> Any:
                        first()
                        result = method(*args, **kwargs)
                        then()
                        return result

                    self._replace(optimizer, name, switch)

    def step_lr_schedules(self, module: LightningModule, advances: Callable[[Any], bool]) -> None:
        """Let an lr_schedule stand still after some optimizer steps.

        Args:
            module: whose ``lr_scheduler_step`` it is.
            advances: whether a scheduler advances now.
        """
        step = module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any | None) -> None:
            if advances(scheduler):
                step(scheduler, metric)

        self._replace(module, "lr_scheduler_step", lr_scheduler_step)

    def count_as_existing(self, callback: Any, is_queued: Callable[[Any], bool]) -> None:
        """ModelCheckpoint takes another name where there is a file already; one that is being written counts.

        Args:
            callback: any checkpoint callback.
            is_queued: whether a file of this name is being written, by any process.
        """
        exists = getattr(type(callback), "file_exists", None)
        if exists is None:
            return

        def file_exists(filepath: Any, trainer: Any) -> bool:
            queued = is_queued(filepath)  # collective: not after an `or`
            return bool(exists(callback, filepath, trainer)) or queued

        self._replace(callback, "file_exists", file_exists)

    def around_saves(self, callback: Checkpoint, around: Callable[[Checkpoint, Callable[[], None]], None]) -> None:
        """Let something call the hooks in which a checkpoint callback saves.

        Args:
            callback: any checkpoint callback.
            around: calls the hook that it is given.
        """
        for name in _SAVING_HOOKS:
            hook = getattr(callback, name)

            def called(*args: Any, hook: Callable[..., None] = hook, **kwargs: Any) -> None:
                around(callback, lambda: hook(*args, **kwargs))

            self._replace(callback, name, called)

    def handle_signals(
        self, trainer: Trainer, stop: Callable[[int, Any], None], requeue: Callable[[int, Any], None]
    ) -> None:
        """Replace what Lightning does in handlers of signals; it registers them, and keeps those of the user.

        Args:
            trainer: before its run has started.
            stop: called in the handler of SIGTERM.
            requeue: called in the handler of the signal by which SLURM announces the end of a job's time.
        """
        connector = signal_connector_of(trainer)
        self._replace(connector, SIGTERM_HANDLER, stop)
        self._replace(connector, REQUEUE_HANDLER, requeue)
        self._replace(trainer.fit_loop.epoch_loop, SIGTERM_BROADCAST, lambda: None)

    def end_train_batch(self, module: LightningModule, end: Callable[[], None]) -> None:
        """Call ``end`` behind all other hooks that end a training batch, before Lightning counts the batch as done."""
        hook = module.on_train_batch_end

        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            hook(*args, **kwargs)
            end()

        self._replace(module, "on_train_batch_end", on_train_batch_end)

    def around_lr_find(self, finder: LearningRateFinder, around: Callable[[Callable[[], None]], None]) -> None:
        """Let something watch a search for a learning rate.

        Args:
            finder: whose search.
            around: calls the search that it is given.
        """
        find = finder.lr_find

        def lr_find(*args: Any, **kwargs: Any) -> None:
            around(lambda: find(*args, **kwargs))

        self._replace(finder, "lr_find", lr_find)

    def undo(self) -> None:
        """Give all methods back."""
        for owner, name, before in reversed(self._replaced):
            if before is _OF_CLASS:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)
        self._replaced = []
