"""The command's parser: an error is one line."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override


class UsageError(Exception):
    """The command line or a configuration file cannot be used.

    No ``UserError``, which is a ``ValueError``: the parser would take one for a wrong value, and wrap it once more.
    """


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
