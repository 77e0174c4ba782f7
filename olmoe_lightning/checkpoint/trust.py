"""What of a checkpoint is not loaded without trust: ``weights_only=True`` knows plain values and tensors alone."""

from __future__ import annotations

import io
import pkgutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Untrusted(NamedTuple):
    """A value that is refused."""

    place: str
    """Where it is in the dictionary, as one writes it in Python."""
    kind: str
    """Its class."""
    names: list[str]
    """What ``torch.serialization.add_safe_globals`` must be given to let it in; empty if nothing does."""

    def __str__(self) -> str:
        return f"{self.place} ({self.kind})"


def untrusted(checkpoint: Mapping[str, Any]) -> list[Untrusted]:
    """The values for which ``torch.load(weights_only=True)`` would refuse a checkpoint; the innermost ones.

    Args:
        checkpoint: its dictionary; the values of its tensors are not looked at.
    """
    return list(_find(_without_values(checkpoint), ""))


def names_of(found: Sequence[Untrusted]) -> list[str]:
    """What lets all of them in; empty if nothing does."""
    return sorted({name for each in found for name in each.names}) if all(each.names for each in found) else []


def names_in(file: Path) -> list[str]:
    """The classes and functions for which a file is refused; empty if it is none that can be looked into."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # it is damaged: whoever asks has an error of its own
        return []


def refusal(file: Path, checkpoint: Path) -> str:
    """Why a file was not loaded, if it is because of trust; else empty.

    Args:
        file: that ``torch.load`` refused.
        checkpoint: what the sentence speaks of.
    """
    names = names_in(file)
    if not names:
        return ""
    return f"{checkpoint} holds objects that are not loaded without trust, of {', '.join(names)}; {advice(names)}"


def advice(names: list[str]) -> str:
    """What to do about them; without names there is one way only."""
    trust = (
        "give weights_only=False to fit, validate, test, predict or load_from_checkpoint if you trust whoever wrote it"
    )
    return f"{trust}, or call torch.serialization.add_safe_globals([{', '.join(names)}]) first" if names else trust


def _find(value: Any, place: str) -> Iterator[Untrusted]:
    file = _written(value)
    if file is None or _is_loaded(file):
        return
    inside: list[Untrusted] = []
    if isinstance(value, Mapping):
        for key, each in value.items():
            inside += _find(key, f"a key of {place or 'the checkpoint'}")
            inside += _find(each, f"{place}[{key!r}]" if place else str(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            inside += _find(each, f"{place}[{index}]")
    yield from inside or [Untrusted(place, _name(type(value)), _needed(file, value))]


def _written(value: Any) -> io.BytesIO | None:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception:  # who writes the checkpoint says so
        return None
    return file


def _is_loaded(file: io.BytesIO) -> bool:
    file.seek(0)
    try:
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        return False
    return True


def _needed(file: io.BytesIO, value: Any) -> list[str]:
    """The names that let a value in, if there are some: torch builds nothing but dictionaries and objects."""
    file.seek(0)
    names = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if isinstance(value, np.ndarray | np.generic | np.dtype):  # which name their types without saying so
        names.add(_name(type(value if isinstance(value, np.dtype) else value.dtype)))
    try:
        with torch.serialization.safe_globals([pkgutil.resolve_name(name) for name in names]):
            return sorted(names) if _is_loaded(file) else []
    except (ImportError, AttributeError):
        return []


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_NO_VALUES = torch.empty(0)


def _without_values(value: Any) -> Any:
    """The same with one tensor in the place of all, so that only what surrounds them is written."""
    if type(value) in (Tensor, nn.Parameter):
        return _NO_VALUES
    if type(value) is dict or type(value) is OrderedDict:
        return {key: _without_values(each) for key, each in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_without_values(each) for each in value)
    return value
