"""RunManifest: what this run is, in one JSON file beside its logs."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from olmoe_lightning import ModelConfig, write_manifest


class RunManifest(Callback):
    """Writes a manifest when fitting starts: enough to tell later what was trained, on what, and by which code.

    The file holds the whole configuration of the command, the resolved model configuration, the named preset that is
    nearest to it and the difference to that, parameter counts and FLOPs per token, the trainer's settings, the
    topology, the data's fingerprint, versions and devices, the command line, the git commit of the working directory,
    and the time. ``olmoe-lightning fit --from-manifest`` repeats the run. It is plain JSON, written by rank 0 into the
    trainer's log directory under a temporary name and then renamed, so that a reader never sees half of it. A run with
    ``fast_dev_run`` writes nothing.

    Args:
        filename: name of the file in ``trainer.log_dir`` (``default_root_dir`` without a logger).
    """

    def __init__(self, filename: str = "manifest.json") -> None:
        self.filename = filename
        self.path: Path | None = None
        """The file, once it is written."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        directory = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast: every rank must ask
        path = directory / self.filename
        if trainer.is_global_zero:
            if not isinstance(getattr(pl_module, "config", None), ModelConfig):
                name = type(pl_module).__name__
                rank_zero_warn(f"The manifest has no model section: {name} has no `config: ModelConfig`.")
            write_manifest(path, trainer, pl_module)
        self.path = path

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Some strategies read a checkpoint only now, and which one that is, is known only then.
        if self.path is not None and trainer.ckpt_path is not None and trainer.is_global_zero:
            write_manifest(self.path, trainer, pl_module)
