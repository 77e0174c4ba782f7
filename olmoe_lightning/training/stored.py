"""A module from a checkpoint directory, and hyperparameters compared when a run resumes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule

from olmoe_lightning.checkpoint.foreign.hf_config import functional_differences
from olmoe_lightning.checkpoint.meta import load_sharded, read_meta
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError

RESTORED = ("learning_rate", "expert_lr_multiplier", "weight_decay", "betas", "eps", "decay_all")
"""Settings that come back with the optimizer's state."""

Module = TypeVar("Module", bound=LightningModule)


def load_directory(
    cls: type[Module],
    path: Path,
    map_location: Any,
    hparams_file: Any,
    strict: bool | None,
    weights_only: bool | None,
    overrides: Mapping[str, Any],
) -> Module:
    """A module from a sharded directory; see :meth:`olmoe_lightning.OLMoE.load_from_checkpoint`."""
    if hparams_file is not None:
        raise UserError("hparams_file: a directory has its hyperparameters; give others as keyword arguments")
    if map_location is not None and not isinstance(map_location, str | torch.device):
        raise UserError(f"map_location ({map_location!r}) of a directory must be a device, for example 'cpu'")
    checkpoint = read_meta(path, weights_only)
    saved = checkpoint.get("hyper_parameters") or {}
    if not isinstance(saved, dict):
        raise UserError(f"{path}: the hyperparameters are a {type(saved).__name__}, not a dictionary")
    checkpoint["hyper_parameters"] = {**saved, **overrides}
    known = inspect.signature(cls.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    module: Any = cls(**{k: v for k, v in checkpoint["hyper_parameters"].items() if takes_all or k in known})
    module.built()
    module.on_load_checkpoint(checkpoint)
    load_sharded(module, checkpoint, module.strict_loading if strict is None else strict)
    moved: Module = module.to(map_location or "cpu")
    return moved


def refuse_other_network(config: ModelConfig, hyper_parameters: Mapping[str, Any]) -> None:
    """Stop at the checkpoint of another network.

    Raises:
        UserError: the configurations differ in something that the weights depend on; the message lists it.
    """
    if "config" in hyper_parameters:
        differences = functional_differences(config, ModelConfig.from_dict(hyper_parameters["config"]))
        if differences:
            raise UserError(f"the checkpoint holds another network: {'; '.join(differences)}")


def restored_settings(asked: Mapping[str, Any], hyper_parameters: Mapping[str, Any]) -> str:
    """Which settings came with the optimizer's state although others were asked for; empty if none.

    Args:
        asked: the module's, by name.
        hyper_parameters: of the checkpoint.
    """
    other = {name: hyper_parameters.get(name, asked[name]) for name in RESTORED}
    other = {name: value for name, value in other.items() if value != asked[name]}
    if not other:
        return ""
    return (
        f"The optimizer continues with {', '.join(f'{k} {v}' for k, v in other.items())} of the checkpoint, not with "
        f"{', '.join(f'{k} {asked[k]}' for k in other)}. To change these, start from its weights with model.pretrained "
        "instead of ckpt_path."
    )
