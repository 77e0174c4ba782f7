"""OLMoE and checkpoints: what it adds to them, what it refuses, and a module from a checkpoint alone."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from olmoe_lightning.checkpoint.foreign.hf_config import functional_differences
from olmoe_lightning.checkpoint.meta import load_sharded, read_meta
from olmoe_lightning.config import ModelConfig
from olmoe_lightning.errors import UserError
from olmoe_lightning.training.module_writing import WritingModel


class StoredModel(WritingModel):
    """A language model whose checkpoints are enough to rebuild it and to write text."""

    _loaded: dict[str, Any]
    """Hyperparameters of the checkpoint that was loaded."""
    _tokenizer: str | None
    """Of the data, as checkpoints keep it."""

    @classmethod
    @override
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """A module from a checkpoint: a sharded directory of :class:`~olmoe_lightning.MoEStrategy`, or a file.

        Files are loaded as Lightning does it. A directory is read into this process alone, onto the device
        ``map_location`` (by default the CPU), and without trust unless ``weights_only=False``; ``hparams_file`` is not
        for directories. Keyword arguments are hyperparameters that win over the checkpoint's.

        Raises:
            ValueError: the directory is no sharded checkpoint, is damaged, or holds another network.
        """
        if not isinstance(checkpoint_path, str | os.PathLike) or not Path(checkpoint_path).is_dir():
            return super().load_from_checkpoint(
                checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs
            )
        if hparams_file is not None:
            raise UserError("hparams_file: a directory has its hyperparameters; give others as keyword arguments")
        if map_location is not None and not isinstance(map_location, str | torch.device):
            raise UserError(f"map_location ({map_location!r}) of a directory must be a device, for example 'cpu'")
        checkpoint = read_meta(Path(checkpoint_path), weights_only)
        saved = checkpoint.get("hyper_parameters") or {}
        if not isinstance(saved, dict):
            raise UserError(f"{checkpoint_path}: the hyperparameters are a {type(saved).__name__}, not a dictionary")
        checkpoint["hyper_parameters"] = saved | kwargs
        known = inspect.signature(cls.__init__).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        module = cls(**{k: v for k, v in checkpoint["hyper_parameters"].items() if takes_all or k in known})
        module.built()
        module.on_load_checkpoint(checkpoint)
        load_sharded(module, checkpoint, module.strict_loading if strict is None else strict)
        return module.to(map_location or "cpu")

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the tokenizer too: a checkpoint alone is enough to write text."""
        if self._tokenizer is not None:
            checkpoint["tokenizer"] = self._tokenizer

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the weights of another network.

        Raises:
            ValueError: the configurations differ in something that the weights depend on; the message lists it.
        """
        self._loaded = checkpoint.get("hyper_parameters", {})
        self._tokenizer = self._tokenizer or checkpoint.get("tokenizer")
        if "config" in self._loaded:
            differences = functional_differences(self.config, ModelConfig.from_dict(self._loaded["config"]))
            if differences:
                raise UserError(f"the checkpoint holds another network: {'; '.join(differences)}")

    @override
    def on_train_start(self) -> None:
        """After a resume, say which settings came with the optimizer's state although others were asked for."""
        restored = ("learning_rate", "expert_lr_multiplier", "weight_decay", "betas", "eps", "decay_all")
        other = {name: self._loaded.get(name, getattr(self, name)) for name in restored}
        other = {name: value for name, value in other.items() if value != getattr(self, name)}
        if self.trainer.global_step and other:
            rank_zero_warn(
                f"The optimizer continues with {', '.join(f'{k} {v}' for k, v in other.items())} of the checkpoint, "
                f"not with {', '.join(f'{k} {getattr(self, k)}' for k in other)}. To change these, start from its "
                "weights with model.pretrained instead of ckpt_path."
            )
