"""The ``olmoe-lightning`` command: Lightning's own fit, validate, test and predict, and the tools around them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

import olmoe_lightning
from olmoe_lightning.callbacks import WritePredictions  # its room too: YAML may name the callbacks without it
from olmoe_lightning.checkpoint import convert, read_config, read_tokenizer
from olmoe_lightning.checkpoint.manifest import (
    FILENAME,
    data_differences,
    device_differences,
    environment_differences,
    read_manifest,
)
from olmoe_lightning.checkpoint.meta import read_meta
from olmoe_lightning.data import TokenDataModule, load_tokenizer, tokenize_files
from olmoe_lightning.data.tokenizer import BPETokenizer, Tokenizer
from olmoe_lightning.errors import MissingFileError, UserError
from olmoe_lightning.module import OLMoE
from olmoe_lightning.tools.parity import Fault, ParityCase, ParityError, format_table, run_parity
from olmoe_lightning.tools.plan import plan

USAGE = """usage: olmoe-lightning COMMAND [options]

Train (PyTorch Lightning; each has --help and --print_config):
  fit        train a model:        olmoe-lightning fit --config examples/quickstart.yaml
             the same again:       olmoe-lightning fit --from-manifest RUN/manifest.json
  validate   losses of a checkpoint on held-out data:
                                   olmoe-lightning validate --config RUN/config.yaml --ckpt_path PATH.ckpt
  test       the same, logged as test
  predict    continue held-out text; writes predictions.jsonl beside the logs

Tools (each has --help):
  generate   write text:           olmoe-lightning generate --checkpoint PATH.ckpt --prompt "def "
  tokenize   text to a token file: olmoe-lightning tokenize texts/ --output tokens.npy --tokenizer bpe:8192
  convert    between checkpoints, Hugging Face OLMoE and single files; dense models to experts:
                                   olmoe-lightning convert --from-hf DIR --to-native DIR
  parity     compare training on several processes with one process:
                                   olmoe-lightning parity --devices 4 --expert-parallel 2
  plan       what a pipeline schedule would do: layers, timeline, idle time, memory:
                                   olmoe-lightning plan --schedule 1f1b --pipeline-parallel 4 --num-microbatches 8

Options may be written with - or _. --version prints the version.
"""

TRAINING = ("fit", "validate", "test", "predict")


class UsageError(UserError):
    """The command line or a configuration file cannot be used."""


class Parser(LightningArgumentParser):
    """A parser whose errors are one line: the usage of a training command alone would fill two screens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("usage", "%(prog)s [options]")
        kwargs.setdefault("allow_abbrev", False)  # a typing error must not pass as an abbreviation
        super().__init__(*args, **kwargs)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # an attempt of the parser's own, which it expects to fail in its way
            super().error(message, ex)
        text = " ".join(line.strip() for line in message.splitlines())
        parser = getattr(ex, "subcommand_parser", None) or self
        raise UsageError(f"{text} (see {parser.prog.replace(' [options]', '')} --help)") from ex


class SaveConfig(SaveConfigCallback):
    """Saves ``config.yaml``, and has the configuration for a manifest."""

    @property
    def resolved_config(self) -> dict[str, Any]:
        """Every option of the command with its value, as plain values."""
        return plain_config(self.parser, self.config)


def plain_config(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    """A configuration in JSON's types; ``.inf``, which JSON cannot say, as the text that the parser reads so."""
    yaml = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}
    return json.loads(parser.dump(config, format="json", skip_none=False), parse_constant=yaml.__getitem__)


class SameData(Callback):
    """Compares the data with that of the run that is repeated, before anything is trained.

    Args:
        path: the manifest of that run, for the message.
        then: what it holds.
        strict: other data is an error; else it is told like other differences.
    """

    def __init__(self, path: str, then: Mapping[str, Any], strict: bool) -> None:
        self.path, self.then, self.strict = path, then, strict

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        found = data_differences(self.then, trainer.datamodule)  # type: ignore[attr-defined]
        if found and self.strict:
            raise UsageError(
                f"the data is not that of {self.path}: {'; '.join(found)}; restore it, or accept what is there "
                "with --data.strict-resume false"
            )
        tell_differences(self.path, [f"data {difference}" for difference in found])


@rank_zero_only
def tell_differences(path: str, found: Sequence[str]) -> None:
    """One line on stderr for each."""
    for difference in found:
        print(f"olmoe-lightning: not as in {path}: {difference}", file=sys.stderr, flush=True)


def take_manifest(words: Sequence[str]) -> tuple[list[str], str | None, dict[str, Any]]:
    """Put the configuration that ``--from_manifest PATH`` names in its place, as ``--config`` with the text of it.

    Returns:
        The words without the option, its path (``None`` if it was not given) and the manifest.

    Raises:
        UsageError: the option is not used as it is meant.
        ManifestError: there is no such manifest, or it cannot be used.
    """
    places = [place for place, word in enumerate(words) if word.partition("=")[0] == "--from_manifest"]
    if not places:
        return list(words), None, {}
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
    return [*before, "--config", json.dumps(manifest["config"]), *after], path, manifest


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
        }
        if torch.backends.mps.is_available():
            defaults["trainer.accelerator"] = "cpu"  # `auto` would take the Apple GPU, which lacks what we need
        parser.set_defaults(defaults)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and remember what was asked for before Lightning lays a checkpoint's hyperparameters over it."""
        self._repeats: str | None = None
        if isinstance(args, list):
            args, self._repeats, self._manifest = take_manifest(args)
        if self._repeats is not None:
            tell_differences(self._repeats, environment_differences(self._manifest))
        try:
            super().parse_arguments(parser, args)
        except UsageError as error:
            if self._repeats is not None:
                raise UsageError(f"repeating {self._repeats}: {error}") from error
            if "parsing config" not in str(error) or not isinstance(args, list):
                raise
            # The parser knows line and column of the mistake but not the file.
            words = " ".join(map(str, args)).replace("--config=", "--config ").split()
            files = [after for word, after in itertools.pairwise(words) if word in ("-c", "--config")]
            raise UsageError(f"{', '.join(files)}: {error}") from error
        self._asked = self.config.clone()

    @override
    def _parse_ckpt_path(self) -> None:
        """Lightning lays a file's hyperparameters over the configuration; here a directory's too."""
        super()._parse_ckpt_path()
        path = Path((self.config.get(self.config.subcommand) or {}).get("ckpt_path") or "")
        if path.name and path.is_dir():
            settings = read_meta(path).get("hyper_parameters") or {}
            known = inspect.signature(OLMoE.__init__).parameters
            settings = {name: value for name, value in settings.items() if name in known}
            self.config = self.parser.parse_object({self.config.subcommand: {"model": settings}}, self.config)

    @override
    def before_instantiate_classes(self) -> None:
        """With ``ckpt_path``: a setting that was changed from its default wins over the checkpoint's."""
        if not self._asked[self.subcommand].get("ckpt_path"):
            return
        if self._repeats is not None:  # a resumed run: the checkpoint's settings are in the manifest already
            self.config[self.subcommand].model = self._asked[self.subcommand].model
            return
        asked, config = self._asked[self.subcommand].model, self.config[self.subcommand].model
        for name, parameter in inspect.signature(OLMoE.__init__).parameters.items():
            if name in asked and asked[name] != parameter.default:
                config[name] = asked[name]

    def before_fit(self) -> None:
        """A repeated run says what is different, writes into a place of its own, and checks its data."""
        trainer: Any = self.trainer
        if self._repeats is None:
            return
        tell_differences(self._repeats, device_differences(self._manifest, trainer))
        if not trainer.fast_dev_run and trainer.is_global_zero:
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            if any((folder / name).exists() for name in ("config.yaml", FILENAME)):
                raise UsageError(
                    f"the repeated run would write into {folder}, where another run lies; give it a place of its own: "
                    "--trainer.default_root_dir, or save_dir, name or version of --trainer.logger.init_args"
                )
        then = self._manifest["config"].get("data") or {}
        now = plain_config(self.parser, self.config)["fit"]["data"]
        same_settings = all(now.get(name) == value for name, value in then.items())
        strict = same_settings and getattr(self.datamodule, "strict_resume", True)
        # The first of all callbacks: the others may have written something by then.
        trainer.callbacks.insert(0, SameData(self._repeats, self._manifest, strict))

    def before_predict(self) -> None:
        """The continuations go to a file, if no callback says otherwise."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, WritePredictions) for callback in callbacks):
            callbacks.append(WritePredictions())


def generate(
    checkpoint: str,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    num_samples: int = 1,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str = "auto",
) -> None:
    """Print texts that a trained model writes.

    Args:
        checkpoint: a checkpoint of the trainer, or a directory or file with Hugging Face or converted weights.
        prompt: text to continue; empty to start a document.
        max_new_tokens: tokens to write at most.
        temperature: 0 takes the most likely token each time.
        top_p: sample among the most likely tokens that together reach this probability.
        num_samples: texts to write.
        seed: of the sampling.
        tokenizer: ``byte``, or the path of a ``tokenizer.json``; by default the one that is in the checkpoint.
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU if there is one.

    Raises:
        ValueError: a number is out of range, or the tokenizer does not fit the model.
        FileNotFoundError: there is no such checkpoint.
    """
    if num_samples < 1:
        raise UserError(f"num_samples ({num_samples}) must be at least 1")
    path = Path(checkpoint)
    if not path.exists():
        raise MissingFileError(f"there is no checkpoint at {checkpoint}")
    if path.is_dir() or path.suffix == ".safetensors":
        model = OLMoE(read_config(checkpoint), pretrained=checkpoint)
    else:
        model = OLMoE.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    model.built()
    text = _tokenizer_of(path) if tokenizer is None else load_tokenizer(tokenizer)
    if text.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {text.vocab_size} tokens, the model {model.config.vocab_size}; "
            "give the tokenizer that it was trained with"
        )
    ids = [text.eos_id, *text.encode(prompt)]
    room = model.config.max_seq_len - len(ids)
    if room < 1:
        raise UserError(f"the prompt has {len(ids) - 1} tokens, the model's max_seq_len is {model.config.max_seq_len}")

    place = _device(device)
    model.to(place)
    prompts = torch.tensor([ids] * num_samples, device=place)
    sampler = torch.Generator(place).manual_seed(seed)
    rows = model.generate(prompts, min(max_new_tokens, room), temperature, top_p, text.eos_id, sampler)
    for index, row in enumerate(rows.tolist()):
        if num_samples > 1:
            print(f"--- {index + 1} of {num_samples}")
        written = row[1:]
        if text.eos_id in written:
            written = written[: written.index(text.eos_id)]
        print(text.decode(written))


def _tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer that lies in a checkpoint."""
    if (path / "tokenizer.json").is_file():
        return load_tokenizer(str(path))
    saved = read_tokenizer(path)
    if saved is None:
        raise UserError(f"{path} holds no tokenizer; name the one that it was trained with by --tokenizer")
    return load_tokenizer("byte") if saved == "byte" else BPETokenizer.from_json(saved)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device {name!r} is not known; give cpu, cuda or auto") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda': PyTorch sees no GPU here; give cpu or auto")
    return device


def parity(timeout: float = 120.0, break_: Fault | None = None, **options: Any) -> int:
    """Train a small model on several processes of this machine and on one, and print how far the results are apart.

    Args:
        timeout: seconds, after which the processes are ended.
        break_: make this mistake on purpose, to see it in the table.
        **options: of :class:`~olmoe_lightning.tools.parity.ParityCase`.

    Returns:
        1 if a quantity is farther from one process than its bound, or a process failed; else 0.
    """
    case = ParityCase(**options)
    try:
        rows = run_parity(case, break_, timeout, progress=lambda line: print(line, file=sys.stderr, flush=True))
    except ParityError as error:
        print(f"olmoe-lightning parity: {error}", file=sys.stderr)
        return 1
    print(format_table(rows))
    deviating = sum(not row.ok for row in rows)
    print(f"{deviating} of {len(rows)} quantities deviate" if deviating else f"all {len(rows)} quantities agree")
    return 1 if deviating else 0


TOOLS: dict[str, Callable[..., Any]] = {
    "generate": generate,
    "tokenize": tokenize_files,
    "convert": convert,
    "parity": parity,
    "plan": plan,
}


def run_tool(name: str, args: Sequence[str]) -> int:
    """Call one of :data:`TOOLS`; its arguments become options, and ``inputs`` the words that are no option.

    Returns:
        The exit status.
    """
    tool = TOOLS[name]
    parser = Parser(prog=f"olmoe-lightning {name}", description="")
    parameters = inspect.signature(tool).parameters
    if "inputs" in parameters:
        parser.add_argument("inputs", nargs="+", type=str, help="files, folders and globs")
        parser.usage = "%(prog)s INPUTS ... [options]"
    parser.add_function_arguments(tool, skip={name for name in ("inputs", "break_") if name in parameters})
    if "break_" in parameters:  # without the underscore, which Python needs
        parser.add_argument("--break", type=Fault, help="make this mistake on purpose, to see it in the table")
    options = parser.parse_args(args).as_dict()
    if "break" in options:
        options["break_"] = options.pop("break")
    return int(tool(**options) or 0)


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the command.

    Args:
        args: command line without the program's name; ``None`` takes ``sys.argv``.

    Returns:
        The exit status: 0; 1 if a comparison failed; 2 after an error of the user, which is told without a traceback.
    """
    words = [_underscored(word) for word in (sys.argv[1:] if args is None else args)]
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if words[0] == "--version":
        print(olmoe_lightning.__version__)
        return 0
    try:
        with _quiet():
            if words[0] in TOOLS:
                return run_tool(words[0], words[1:])
            if words[0] in TRAINING:
                OLMoECLI(words)
            else:
                commands = ", ".join((*TRAINING, *TOOLS))
                raise UsageError(f"{words[0]!r} is not a command; there are {commands}")
    except Exception as error:
        if not is_users(error):
            raise
        print(f"olmoe-lightning: error: {error}", file=sys.stderr)
        return 2
    return 0


def _underscored(word: str) -> str:
    """``--from-hf=a-b`` as ``--from_hf=a-b``: both spellings of an option's name are understood."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else word


def is_users(error: Exception) -> bool:
    """Whether an error tells the user what was wrong with the input, so that its message is all that is needed.

    Ours are :class:`~olmoe_lightning.errors.UserError`; every other error of our code is a bug. Lightning refuses most
    arguments with Python's own errors.
    """
    if isinstance(error, UserError | MisconfigurationException):
        return True
    if isinstance(error, OSError) and error.filename is not None:  # missing file, no permission, full disk
        return True
    if not isinstance(error, ValueError | TypeError | OSError | ImportError):
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return innermost.f_globals.get("__name__", "").split(".")[0] == "lightning"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence advice that does not apply to these programs; everything else is shown."""
    messages = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    def useful(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not text.startswith(
            ("\N{ELECTRIC LIGHT BULB}", "TPU available", "HPU available", "GPU available: False")
        )

    messages.addFilter(useful)
    with warnings.catch_warnings():
        for advice in (
            ".*does not have many workers which may be a bottleneck.*",  # memory-mapped tokens need no workers
            ".*smaller than the logging interval.*",
            ".*LightningCLI's args parameter is intended to run from within Python.*",  # so it is: they are ours
            ".*The dirpath has changed.*",  # each run has its folder, and the checkpoint comes from another run
            ".*treespec.*is deprecated.*",
        ):
            warnings.filterwarnings("ignore", advice)
        try:
            yield
        finally:
            messages.removeFilter(useful)


if __name__ == "__main__":
    sys.exit(main())
