"""The ``olmoe-lightning`` command: Lightning's own fit, validate, test and predict, and the tools around them."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

import olmoe_lightning
from olmoe_lightning.checkpoint import convert
from olmoe_lightning.commands.generate import generate
from olmoe_lightning.commands.parity import parity
from olmoe_lightning.commands.parser import Parser, UsageError
from olmoe_lightning.commands.training import OLMoECLI
from olmoe_lightning.data import tokenize_files
from olmoe_lightning.errors import UserError
from olmoe_lightning.strategy import NonFiniteError
from olmoe_lightning.tools.parity import Fault
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
        The exit status: 0; 1 if a comparison failed or numbers were not finite; 2 after an error of the user, which is
        printed without traceback.
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
    except NonFiniteError as error:
        print(f"olmoe-lightning: error: {error}", file=sys.stderr)
        return 1
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

    Ours are :class:`~olmoe_lightning.errors.UserError` and ``UsageError``; every other error of our code is a bug.
    Lightning refuses most arguments with Python's own errors.
    """
    if isinstance(error, UserError | UsageError | MisconfigurationException):
        return True
    if isinstance(error, OSError) and error.filename is not None:  # missing file, no permission, full disk
        return True
    if not isinstance(error, ValueError | TypeError | OSError | ImportError):
        return False
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return str(innermost.f_globals.get("__name__", "")).split(".")[0] == "lightning"


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
