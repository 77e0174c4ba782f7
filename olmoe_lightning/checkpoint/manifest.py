"""What a run is, in one JSON file: written beside the logs and into checkpoints, read to repeat it.

It holds the resolved configuration, the topology, sizes, versions, the state of the code and the data's fingerprint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer

from olmoe_lightning.config import PRESETS, ModelConfig
from olmoe_lightning.errors import UserError
from olmoe_lightning.files import write_atomically
from olmoe_lightning.parallel import Mesh

FORMAT = 1
"""Version of the manifest's layout; it goes up when a reader of the old one would misunderstand the new one."""

FILENAME = "manifest.json"

_LARGEST = 2**24  # bytes; a checkpoint of gigabytes that was taken for a manifest is not read to its end


class ManifestError(UserError):
    """A file is not a manifest, or not one that this version can use."""


# ---------------------------------------------------------------------------------------------- writing


def build_manifest(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """The manifest as plain values; parts that module, data or the way of starting do not offer are ``None``.

    It says what is true when it is built, of the code too: build it once, when fitting starts, for all checkpoints of
    the run. It asks no other process, so that a single rank may call it.

    Args:
        trainer: while it fits, so that its processes, its data and its strategy are set up.
        pl_module: what is trained.
    """
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    config = getattr(pl_module, "config", None)
    seq_len = getattr(datamodule, "seq_len", None)
    fingerprint = getattr(datamodule, "fingerprint", None)
    manifest: dict[str, Any] = plain(
        {
            "format": FORMAT,
            "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "directory": Path.cwd(),
            "config": _command_config(trainer),
            "model": describe_model(config, seq_len) if isinstance(config, ModelConfig) else None,
            "trainer": _describe_trainer(trainer),
            "topology": describe_topology(trainer, pl_module),
            "data": fingerprint() if callable(fingerprint) else None,
            "versions": versions(),
            "git": git_state(Path.cwd()),
        }
    )
    return manifest


def write_manifest(path: Path, trainer: Trainer, pl_module: LightningModule) -> None:
    """Build a manifest and write it; see :func:`build_manifest` and :func:`write_json`."""
    write_json(path, build_manifest(trainer, pl_module))


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


def describe_topology(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """How the work was shared: sizes of the mesh, the pipeline's cut, how tokens travelled.

    The keys are always the same; what the strategy does not have is ``None``. ``stage_layers`` is the number of layers
    of each stage, as ``MoEStrategy(pipeline_split=...)`` takes it.
    """
    strategy: Any = trainer.strategy
    mesh = getattr(strategy, "mesh", None)
    shape = mesh.shape if isinstance(mesh, Mesh) else None
    stages = getattr(strategy, "stage_map", None)
    return {
        "world_size": trainer.world_size,
        "pipeline": shape and shape.pipeline,
        "expert_replica": shape and shape.expert_replica,
        "expert": shape and shape.expert,
        "schedule": stages and stages.pipeline_schedule,
        "num_microbatches": stages and strategy.num_microbatches,
        "stages_per_rank": stages and stages.stages_per_rank,
        "stage_layers": stages and [len(layers) for layers in stages.layers],
        "comm": _comm(strategy, pl_module),
        "shard_optimizer": getattr(strategy, "shard_optimizer", None),
        "precision_plugin": type(trainer.precision_plugin).__name__,
    }


def _comm(strategy: Any, pl_module: LightningModule) -> str | None:
    """The plugins in use; before the experts are placed, or without any, the one that was asked for."""
    asked = getattr(strategy, "comm", None)
    if asked is None:
        return None
    transports: list[Any] = [getattr(layer, "transport", None) for layer in pl_module.modules()]
    used = {str(transport.name) for transport in transports if hasattr(transport, "name")}
    return ", ".join(sorted(used)) or getattr(asked, "name", asked)


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; ``None`` outside a checkout, without git, or before a commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, Any]:
    """Of the software and the machine."""
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


def _command_config(trainer: Trainer) -> dict[str, Any] | None:
    """What the command was resolved to; its callback has it, and a script has no such callback."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    config = next((found for c in callbacks if (found := getattr(c, "resolved_config", None)) is not None), None)
    if config is not None and config.get("ckpt_path"):
        # `last` is another file by the time the run is repeated; the trainer knows which one it was.
        config = config | {"ckpt_path": trainer.ckpt_path}
    return config


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


# ---------------------------------------------------------------------------------------------- reading


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run that the command can repeat.

    Args:
        path: the file, or a folder that holds it: of a run or of a checkpoint.

    Raises:
        ManifestError: there is none, it is not readable, from a newer version, or without the command's configuration.
    """
    file = path / FILENAME if path.is_dir() else path
    if not file.exists():
        raise ManifestError(f"{path} holds no {FILENAME}" if path.is_dir() else f"there is no manifest at {path}")
    try:
        with file.open("rb") as opened:
            values = json.loads(opened.read(_LARGEST))
    except OSError as error:
        raise ManifestError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{file} is not a manifest: it is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ManifestError(f"{file} is not a manifest: it holds a {type(values).__name__} instead of named values")
    made = values.get("format", 0)
    if not isinstance(made, int) or made > FORMAT:
        raise ManifestError(
            f"{file} has format {made!r}, and this version of olmoe-lightning reads formats up to {FORMAT}; "
            f"take a newer one (it was written by {_inner(values, 'versions', 'olmoe_lightning')})"
        )
    if not isinstance(values.get("config"), dict):
        raise ManifestError(
            f"{file} holds no configuration of the command, so that only the script that wrote it can repeat its run"
        )
    return values


def environment_differences(then: Mapping[str, Any]) -> list[str]:
    """What is different here and now from a manifest: versions, the code's state, the working directory.

    Returns:
        ``name: then -> now`` of each.
    """
    names, here = ("olmoe_lightning", "torch", "lightning"), versions()
    git = [_git_text(state) for state in (then.get("git"), git_state(Path.cwd()))]
    lines = differences(
        {**{name: _inner(then, "versions", name) for name in names}, "git": git[0], "directory": then.get("directory")},
        {**{name: here[name] for name in names}, "git": git[1], "directory": str(Path.cwd())},
    )
    if git[0] == git[1] and _inner(then, "git", "dirty"):
        lines.append(f"git: {git[0]}, then and now, which may be others")
    return lines


def _git_text(state: Any) -> str:
    if not isinstance(state, Mapping):
        return "no checkout"
    return f"{state.get('commit')}{' with uncommitted changes' if state.get('dirty') else ''}"


def device_differences(then: Mapping[str, Any], trainer: Trainer) -> list[str]:
    """The same for the number of devices that a trainer will use."""
    return differences(
        {name: _inner(then, "trainer", name) for name in ("devices", "num_nodes")},
        {"devices": trainer.num_devices, "num_nodes": trainer.num_nodes},
    )


def data_differences(then: Mapping[str, Any], datamodule: Any) -> list[str]:
    """The same for the data; files may have moved, and sources may have been renamed.

    Args:
        then: a manifest.
        datamodule: set up; without a ``fingerprint`` nothing is compared.
    """
    fingerprint = getattr(datamodule, "fingerprint", None)
    if not callable(fingerprint) or then.get("data") is None:
        return []
    return differences(then["data"], plain(fingerprint()), ignore=("path", "name"))


def differences(then: Any, now: Any, ignore: tuple[str, ...] = ()) -> list[str]:
    """``outer.inner: then -> now`` of each plain value that differs.

    Args:
        then: nested mappings and lists.
        now: likewise.
        ignore: names, at any depth, that do not count.
    """
    old, new = dict(_flat(then, ignore)), dict(_flat(now, ignore))
    names = dict.fromkeys([*old, *new])
    return [f"{n}: {old.get(n, 'none')} -> {new.get(n, 'none')}" for n in names if old.get(n) != new.get(n)]


def _flat(value: Any, ignore: tuple[str, ...], name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping | list):
        yield name, value
        return
    for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
        if key not in ignore:
            yield from _flat(entry, ignore, f"{name}.{key}" if name else str(key))


def _inner(manifest: Mapping[str, Any], section: str, name: str) -> Any:
    found = manifest.get(section)
    return found.get(name) if isinstance(found, Mapping) else None


# ---------------------------------------------------------------------------------------------- JSON


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
    """Write plain values; on failure the old file stays."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with write_atomically(path) as file:
        file.write(text.encode())
