"""What checkpoint callbacks call best, and last, is there: a save that failed is not named.

A callback writes down a name before it saves under it. With ``on_save_error="warn"`` it is called again later as if
nothing had happened, so what it has written down must be as before.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from olmoe_lightning.training.snapshot import SaveError


@dataclass(frozen=True)
class _Memory:
    """All attributes of a callback at one moment."""

    callback: Checkpoint
    values: dict[str, Any]

    @classmethod
    def of(cls, callback: Checkpoint) -> _Memory:
        values = {k: copy.copy(v) if isinstance(v, dict | list) else v for k, v in vars(callback).items()}
        return cls(callback, values)

    def restore(self) -> None:
        vars(self.callback).clear()
        vars(self.callback).update(self.values)

    def forget(self, path: str, failed: Collection[str]) -> None:
        """Take one name back, of a save that ended later; what it had displaced is on disk and has its place again.

        Args:
            path: of the checkpoint.
            failed: paths of all that have failed.
        """
        callback = self.callback
        if not isinstance(callback, ModelCheckpoint):
            return
        before: dict[str, Any] = self.values["best_k_models"]
        models = callback.best_k_models
        models.pop(path, None)
        for name, score in before.items():
            if name in failed:
                continue
            if callback.save_top_k < 0 or len(models) < callback.save_top_k:
                models.setdefault(name, score)
        if callback.last_model_path == path:
            before_it = self.values["last_model_path"]
            callback.last_model_path = "" if before_it in failed and not os.path.exists(before_it) else before_it
        if not models and callback.best_model_path == path:
            callback.best_model_path, callback.best_model_score = "", None
        if models:
            ranked = sorted(models, key=lambda name: models[name], reverse=callback.mode == "max")
            callback.best_model_path, callback.best_model_score = ranked[0], models[ranked[0]]
            callback.kth_best_model_path, callback.kth_value = ranked[-1], models[ranked[-1]]


class NamedSaves:
    """Watches the hooks of checkpoint callbacks."""

    def __init__(self) -> None:
        self._watched: _Memory | None = None
        self._queued: dict[str, _Memory] = {}
        self._failed: set[str] = set()

    @property
    def watching(self) -> bool:
        """Whether a hook of a checkpoint callback is under way, so that an error must reach its end."""
        return self._watched is not None

    def watch(self, callback: Checkpoint, hook: Callable[[], None], report: Callable[[SaveError], None]) -> None:
        """Call a hook; if a save of it fails, the callback remembers nothing of it.

        Args:
            callback: whose hook it is.
            hook: without arguments.
            report: raises the error, or warns.
        """
        outer, self._watched = self._watched, _Memory.of(callback)
        try:
            hook()
        except SaveError as error:
            self._watched.restore()
            report(error)
        finally:
            self._watched = outer

    def queue(self, path: Any) -> None:
        """A save goes on in the background."""
        if self._watched is not None:
            self._queued[str(path)] = self._watched
            self._failed.discard(str(path))

    def forget(self, path: str) -> None:
        """It has failed; the hook that is under way does not bring it back either."""
        memory = self._queued.pop(path, None)
        if memory is not None:
            self._failed.add(path)
            memory.forget(path, self._failed)
            if self._watched is not None:
                self._watched = _Memory.of(self._watched.callback)

    def clear(self) -> None:
        """The run is over."""
        self._queued, self._failed = {}, set()
