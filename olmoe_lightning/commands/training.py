"""Lightning's fit, validate, test and predict, with this project's module, data and defaults."""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

from olmoe_lightning.callbacks import WritePredictions  # their package too: YAML may name callbacks without it
from olmoe_lightning.checkpoint.meta import read_meta
from olmoe_lightning.commands.ending import EndOfRun
from olmoe_lightning.commands.parser import Parser, UsageError
from olmoe_lightning.commands.repeat import Repetition, take_manifest
from olmoe_lightning.data import TokenDataModule
from olmoe_lightning.module import OLMoE
from olmoe_lightning.strategy import MoEStrategy


class SaveConfig(SaveConfigCallback):
    """Saves ``config.yaml``, and has the configuration for a manifest."""

    @property
    def resolved_config(self) -> dict[str, Any]:
        """Every option of the command with its value, as plain values."""
        return plain_config(self.parser, self.config)


def plain_config(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    """A configuration in JSON's types; ``.inf``, which JSON cannot say, as the text that the parser reads so."""
    yaml = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}
    text = parser.dump(config, format="json", skip_none=False)
    plain: dict[str, Any] = json.loads(text, parse_constant=yaml.__getitem__)
    return plain


class OLMoECLI(LightningCLI):
    """LightningCLI with :class:`OLMoE` and :class:`TokenDataModule`."""

    def __init__(self, args: ArgsType = None) -> None:
        super().__init__(
            OLMoE,
            TokenDataModule,
            args=args,
            parser_class=Parser,
            parser_kwargs={
                "prog": "olmoe-lightning",
                "fit": {
                    "description": "Train a model. With --from-manifest PATH, repeat a run: PATH is its manifest.json, "
                    "or the folder of a run or checkpoint; options behind it win."
                },
            },
            save_config_callback=SaveConfig,
            seed_everything_default=42,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Defaults of the command that differ from Lightning's."""
        defaults: dict[str, Any] = {
            # Its table counts the metrics as layers and finds no FLOPs; OLMoE says its size in one line.
            "trainer.enable_model_summary": False,
            # In one process too: what it promises of steps, weights and checkpoints does not depend on their number.
            "trainer.strategy": MoEStrategy.strategy_name,
        }
        if torch.backends.mps.is_available():
            defaults["trainer.accelerator"] = "cpu"  # `auto` would take the Apple GPU, which lacks what we need
        parser.set_defaults(defaults)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and remember what was asked for before Lightning lays a checkpoint's hyperparameters over it."""
        self._repetition: Repetition | None = None
        if isinstance(args, list):
            args, self._repetition = take_manifest(args)
        if self._repetition is not None:
            self._repetition.compare_environment()
        try:
            super().parse_arguments(parser, args)
        except UsageError as error:
            if self._repetition is not None:
                raise UsageError(f"repeating {self._repetition.path}: {error}") from error
            if "parsing config" not in str(error) or not isinstance(args, list):
                raise
            # The parser knows line and column of the mistake but not the file.
            words = " ".join(map(str, args)).replace("--config=", "--config ").split()
            files = [after for word, after in itertools.pairwise(words) if word in ("-c", "--config")]
            raise UsageError(f"{', '.join(files)}: {error}") from error
        self._asked = self.config.clone()

    @override
    def before_instantiate_classes(self) -> None:
        """With ``ckpt_path``: a setting that was changed from its default wins over the checkpoint's."""
        asked = self._asked[self.subcommand]
        if not asked.get("ckpt_path"):
            return
        if self._repetition is not None:  # a resumed run: the checkpoint's settings are in the manifest already
            self.config[self.subcommand].model = asked.model
            return
        known = inspect.signature(OLMoE.__init__).parameters
        if Path(asked.ckpt_path).is_dir():  # Lightning has read the settings of a file
            settings = read_meta(Path(asked.ckpt_path), asked.get("weights_only")).get("hyper_parameters") or {}
            model = {name: value for name, value in settings.items() if name in known}
            self.config = self.parser.parse_object({self.subcommand: {"model": model}}, self.config)
        config = self.config[self.subcommand].model
        for name, parameter in known.items():
            if name in asked.model and asked.model[name] != parameter.default:
                config[name] = asked.model[name]

    def before_fit(self) -> None:
        """The end is saved. A repeated run says what is different, writes into its own place, and checks its data."""
        trainer: Any = self.trainer
        trainer.callbacks.append(EndOfRun())  # behind all that save
        if self._repetition is None:
            return
        self._repetition.compare_devices(trainer)
        if not trainer.fast_dev_run and trainer.is_global_zero:
            self._repetition.refuse_occupied_folder(trainer)
        data = plain_config(self.parser, self.config)["fit"]["data"]
        compare = self._repetition.compare_data(data, strict=getattr(self.datamodule, "strict_resume", True))
        trainer.callbacks.insert(0, compare)  # the first: the others may write something in their `setup`

    def before_predict(self) -> None:
        """The continuations go to a file, if no callback says otherwise."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, WritePredictions) for callback in callbacks):
            callbacks.append(WritePredictions())
