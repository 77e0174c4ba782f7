"""``fit --from-manifest``: the run that a manifest describes, once more."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from olmoe_lightning.checkpoint.manifest import (
    FILENAME,
    data_differences,
    device_differences,
    environment_differences,
    read_manifest,
)
from olmoe_lightning.commands.parser import UsageError


@dataclass(frozen=True)
class Repetition:
    """A run that repeats another.

    Args:
        path: where the other's manifest lies, as the user named it.
        manifest: what it holds.
    """

    path: str
    manifest: Mapping[str, Any]

    @rank_zero_only
    def print_differences(self, found: Sequence[str]) -> None:
        """One line on stderr for each difference."""
        for difference in found:
            print(f"olmoe-lightning: not as in {self.path}: {difference}", file=sys.stderr, flush=True)

    def compare_environment(self) -> None:
        """Print which versions differ."""
        self.print_differences(environment_differences(self.manifest))

    def compare_devices(self, trainer: Trainer) -> None:
        """Print which devices differ."""
        self.print_differences(device_differences(self.manifest, trainer))

    def refuse_occupied_folder(self, trainer: Trainer) -> None:
        """Refuse to write into the folder of another run.

        Raises:
            UsageError: there is one.
        """
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if any((folder / name).exists() for name in ("config.yaml", FILENAME)):
            raise UsageError(
                f"the repeated run would write into {folder}, where another run lies; give it a place of its own: "
                "--trainer.default_root_dir, or save_dir, name or version of --trainer.logger.init_args"
            )

    def compare_data(self, settings: Mapping[str, Any], strict: bool) -> CompareData:
        """A callback that compares the data before anything is trained.

        Args:
            settings: of this run's data; where they were changed, other data is what the user wants.
            strict: whether other data is refused.
        """
        then = self.manifest["config"].get("data") or {}
        return CompareData(self, strict and all(settings.get(name) == value for name, value in then.items()))


class CompareData(Callback):
    """Compares the data with that of the run that is repeated, before anything is trained.

    Args:
        repetition: the run that is repeated.
        strict: other data is an error; else it is printed like other differences.
    """

    def __init__(self, repetition: Repetition, strict: bool) -> None:
        self.repetition, self.strict = repetition, strict

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        found = data_differences(self.repetition.manifest, trainer.datamodule)  # type: ignore[attr-defined]
        if found and self.strict:
            raise UsageError(
                f"the data is not that of {self.repetition.path}: {'; '.join(found)}; restore it, or accept what is "
                "there with --data.strict-resume false"
            )
        self.repetition.print_differences([f"data {difference}" for difference in found])


def take_manifest(words: Sequence[str]) -> tuple[list[str], Repetition | None]:
    """Put the configuration that ``--from_manifest PATH`` names in its place, as ``--config`` with the text of it.

    Returns:
        The words without the option, and what is repeated (``None`` if the option was not given).

    Raises:
        UsageError: the option is not used as it is meant.
        ManifestError: there is no such manifest, or it cannot be used.
    """
    places = [place for place, word in enumerate(words) if word.partition("=")[0] == "--from_manifest"]
    if not places:
        return list(words), None
    if words[0] != "fit":
        raise UsageError("--from-manifest repeats a training: olmoe-lightning fit --from-manifest PATH")
    if len(places) > 1:
        raise UsageError(f"--from-manifest was given {len(places)} times; a run repeats one other")
    before, (option, *after) = words[: places[0]], words[places[0] :]
    _, equals, path = option.partition("=")
    if not equals:
        path, *after = after or [""]
    if not path or path.startswith("--"):
        raise UsageError(f"--from-manifest needs a {FILENAME}, or the folder of a run or checkpoint that holds one")
    manifest = read_manifest(Path(path))
    return [*before, "--config", json.dumps(manifest["config"]), *after], Repetition(path, manifest)
