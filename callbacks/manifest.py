"""RunManifest: what this run is, in one JSON file beside its logs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from olmoe_lightning.config import PRESETS, ModelConfig


class RunManifest(Callback):
    """Writes a manifest when fitting starts: enough to tell later what was trained, on what, and by which code.

    The file holds the resolved model configuration, the named preset that is nearest to it and the difference to that,
    parameter counts and FLOPs per token, the trainer's settings, the data's fingerprint, versions and devices, the
    command line, the git commit of the working directory, and the time. It is plain JSON, written by rank 0 into the
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
            write_json(path, build_manifest(trainer, pl_module))
        self.path = path


def build_manifest(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The manifest as plain values; parts that module or data do not offer are ``None``."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    config = getattr(pl_module, "config", None)
    if not isinstance(config, ModelConfig):
        rank_zero_warn(f"The manifest has no model section: {type(pl_module).__name__} has no `config: ModelConfig`.")
    seq_len = getattr(datamodule, "seq_len", None)
    fingerprint = getattr(datamodule, "fingerprint", None)
    return plain(
        {
            "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "model": describe_model(config, seq_len) if isinstance(config, ModelConfig) else None,
            "trainer": _describe_trainer(trainer),
            "data": fingerprint() if callable(fingerprint) else None,
            "versions": _versions(),
            "git": git_state(Path.cwd()),
        }
    )


def describe_model(config: ModelConfig, seq_len: int | None = None) -> dict[str, Any]:
    """Configuration, distance to the nearest preset, sizes.

    Args:
        config: the resolved configuration.
        seq_len: tokens of a training sequence, for the FLOPs per token; ``None`` for the model's longest.
    """
    preset, difference = nearest_preset(config)
    seq_len = seq_len or config.max_seq_len
    return {
        "preset": preset,
        "difference_to_preset": {name: f"{old!r} -> {new!r}" for name, (old, new) in difference.items()},
        "num_params": config.num_params,
        "num_active_params": config.num_active_params,
        "seq_len": seq_len,
        "flops_per_token": config.flops_per_token(seq_len),
        "config": config.to_dict(),
    }


def nearest_preset(config: ModelConfig) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The preset with the fewest different fields, and those fields as ``name: (preset's value, config's value)``."""
    values = config.to_dict()

    def difference(preset: ModelConfig) -> dict[str, tuple[Any, Any]]:
        return {name: (old, values[name]) for name, old in preset.to_dict().items() if old != values[name]}

    differences = {name: difference(preset) for name, preset in PRESETS.items()}
    name = min(differences, key=lambda name: len(differences[name]))
    return name, differences[name]


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; ``None`` outside a checkout, without git, or before a commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def plain(value: Any) -> Any:
    """The value in JSON's types; non-finite floats become ``None`` and unknown objects their ``str``."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # scalars of numpy and torch
        return plain(value.item())
    return str(value)


def write_json(path: Path, value: Any) -> None:
    """Write through a temporary file in the same directory; on failure the old file stays and no temporary one does."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a manifest is for everyone who may read the logs
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _describe_trainer(trainer: Trainer) -> dict[str, Any]:
    strategy = trainer.strategy
    sampler = trainer.distributed_sampler_kwargs or {}
    return {
        "accelerator": type(trainer.accelerator).__name__,
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "world_size": trainer.world_size,
        "data_parallel_size": sampler.get("num_replicas", 1),
        "strategy": f"{type(strategy).__module__}.{type(strategy).__qualname__}",
        "precision": trainer.precision,
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "resumed_from": trainer.ckpt_path,
        "root_dir": trainer.default_root_dir,
    }


def _versions() -> dict[str, Any]:
    try:
        ours = metadata.version("olmoe-lightning")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        ours = None
    cuda_devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "olmoe_lightning": ours,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": platform.processor() or platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "devices": cuda_devices,
    }
