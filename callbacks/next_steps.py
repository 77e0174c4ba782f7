"""NextSteps: the last lines of a run, what came out, where it lies and how to go on."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmoe_lightning.callbacks._logging import tensorboards
from olmoe_lightning.callbacks.manifest import RunManifest


class NextSteps(Callback):
    """Prints, after fitting, the best validation loss, the files that exist and the commands that use them.

    Args:
        monitor: name of the validation loss among the logged metrics; lower is better.
        nats_per_byte: name of the loss per byte of text, shown when it is logged.
        prompt: prompt in the command for generation.
    """

    def __init__(
        self, monitor: str = "val/loss", nats_per_byte: str = "val/nats_per_byte", prompt: str = "def "
    ) -> None:
        self.monitor = monitor
        self.nats_per_byte = nats_per_byte
        self.prompt = prompt
        self._log_dir: Path | None = None
        self._best: dict[str, float] = {}
        self._best_step = 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A broadcast: every rank must ask, and after fitting it is too late.
        directory = trainer.log_dir
        self._log_dir = Path(directory) if directory is not None else None
        self._best = {}

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or self.monitor not in trainer.callback_metrics:
            return
        names = [name for name in (self.monitor, self.nats_per_byte) if name in trainer.callback_metrics]
        values = {name: float(trainer.callback_metrics[name]) for name in names}
        if not math.isnan(values[self.monitor]) and values[self.monitor] < self._best.get(self.monitor, math.inf):
            self._best = values
            self._best_step = trainer.global_step

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            print("\n" + "\n".join(self.lines(trainer)) + "\n", flush=True)

    def lines(self, trainer: Trainer) -> list[str]:
        """The text, line by line; only files that exist are named."""
        best, last = _checkpoints(trainer)
        logs = next((Path(found.log_dir) for found in tensorboards(trainer) if Path(found.log_dir).is_dir()), None)
        manifest = next((c.path for c in trainer.callbacks if isinstance(c, RunManifest)), None)  # type: ignore[attr-defined]
        config = self._log_dir / "config.yaml" if self._log_dir is not None else None

        result = []
        if self._best:
            text = f"{self._best[self.monitor]:.4f} at step {self._best_step}"
            if self.nats_per_byte in self._best:
                text += f" ({self._best[self.nats_per_byte]:.4f} nats per byte)"
            result.append(("best validation loss", text))
        files = (
            ("best checkpoint", best),
            ("last checkpoint", last),
            ("TensorBoard logs", logs),
            ("manifest", manifest),
        )
        result += [(name, str(_short(path))) for name, path in files if path is not None and path.exists()]

        commands = []
        if logs is not None:
            commands.append(("see the curves", f"{_program('tensorboard')} --logdir {_quote(logs)}"))
        if (model := best or last) is not None:
            prompt = shlex.quote(self.prompt)
            commands.append(
                (
                    "let it write",
                    f"{_program('olmoe-lightning')} generate --checkpoint {_quote(model)} --prompt {prompt}",
                )
            )
        if (newest := last or best) is not None:
            options = f"--config {_quote(config)} " if config is not None and config.exists() else ""
            if trainer.max_steps > 0 and trainer.global_step >= trainer.max_steps:
                # The checkpoint is at max_steps already: with the old limit fitting would stop at once.
                options += f"--trainer.max_steps {2 * trainer.max_steps} "
            commands.append(("train on", f"{_program('olmoe-lightning')} fit {options}--ckpt_path {_quote(newest)}"))
        return [f"{name + ':':<22}{text}" for name, text in result + commands]


def _checkpoints(trainer: Trainer) -> tuple[Path | None, Path | None]:
    """Best and last checkpoint on disk; the last only where it is another file."""

    def existing(attribute: str) -> Path | None:
        paths = [Path(path) for c in trainer.checkpoint_callbacks if (path := getattr(c, attribute, ""))]
        return next((path for path in paths if path.exists()), None)

    best, last = existing("best_model_path"), existing("last_model_path")
    return best, None if best == last else last


def _program(name: str) -> str:
    """How to call a command from here: by its name, or by its path in a virtual environment that is not activated."""
    beside = Path(sys.executable).with_name(name)
    return name if shutil.which(name) or not beside.exists() else _quote(beside)


def _quote(path: Path) -> str:
    return shlex.quote(str(_short(path)))


def _short(path: Path) -> Path:
    """Relative to the working directory where it lies in it: easier to read, and the commands are run from there."""
    path, here = path.absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
