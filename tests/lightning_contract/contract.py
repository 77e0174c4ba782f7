"""The contract's rows, how a cell is run, and how it is compared with plain Lightning."""

import io
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from laboratory import COLUMNS, PLAIN, Column, Lab
from torch import Tensor

Observation = dict[str, Any]
MAX_DIFFERENCES = 5


@dataclass(frozen=True)
class Row:
    """A feature of Lightning.

    Args:
        group: heading under which the page shows it.
        name: what a user does.
        feature: does it, and returns what is compared: numbers, tensors, strings, and lists and dicts of them. What
            only one process can say is ``None`` on the others.
        refused: by column, words of the sentence with which it is refused.
        differs: what is other than in plain Lightning, and why; the feature does for plain Lightning (``lab.plain``)
            what gives the stated numbers.
        loose: compared by the tolerance of bf16 in every column.
        quick: whether it belongs to the part that every test run takes.
    """

    group: str
    name: str
    feature: Callable[[Lab], Observation]
    refused: Mapping[str, str] = field(default_factory=dict)
    differs: str = ""
    loose: bool = False
    quick: bool = False


@dataclass(frozen=True)
class Raised:
    """What a feature raised in place of an observation."""

    kind: str
    message: str


ROWS: dict[str, Row] = {}


def row(
    group: str,
    name: str,
    refused: str | Mapping[str, str] = "",
    differs: str = "",
    loose: bool = False,
    quick: bool = False,
) -> Callable[[Callable[[Lab], Observation]], Callable[[Lab], Observation]]:
    """Put a feature into the table.

    Args:
        group: see :class:`Row`.
        name: see there; every row has its own.
        refused: words of a refusal by column, or one for all columns.
        differs: see there.
        loose: see there.
        quick: see :class:`Row`.
    """
    if isinstance(refused, str):
        refused = dict.fromkeys(COLUMNS, refused) if refused else {}
    assert not refused.keys() - COLUMNS.keys(), refused

    def keep(feature: Callable[[Lab], Observation]) -> Callable[[Lab], Observation]:
        assert name not in ROWS, f"two rows are called {name!r}"
        ROWS[name] = Row(group, name, feature, refused, differs, loose, quick)
        return feature

    return keep


def observe(names: list[str], column_name: str, folder: str) -> dict[str, Observation | Raised]:
    """Run rows one behind the other in this process of a column."""
    import features  # noqa: F401  (fills the table in a process of its own)

    column = (COLUMNS | PLAIN)[column_name]
    return {name: _observe(ROWS[name].feature, column, Path(folder) / str(number)) for number, name in enumerate(names)}


def _observe(feature: Callable[[Lab], Observation], column: Column, folder: Path) -> Observation | Raised:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    output = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(output), redirect_stderr(output):
            warnings.simplefilter("ignore")
            return feature(Lab(column, folder))
    except Exception as error:
        return Raised(type(error).__name__, str(error))
    finally:
        if column.processes > 1:
            dist.barrier()


def verdict(
    row: Row, column_name: str, reference: Observation | Raised, ranks: list[Observation | Raised]
) -> list[str]:
    """What is wrong with a cell, empty if it keeps the contract.

    Args:
        row: the row.
        column_name: the column.
        reference: what plain Lightning did.
        ranks: what each process of the column did.
    """
    words = row.refused.get(column_name)
    if words is not None:
        return [
            f"rank {rank} should refuse with {words!r}, but " + _told(found)
            for rank, found in enumerate(ranks)
            if not (isinstance(found, Raised) and words in " ".join(found.message.split()))
        ]
    if isinstance(reference, Raised):
        return [f"plain Lightning {_told(reference)}"]
    if not any(isinstance(value, Tensor) or value not in (None, [], {}) for value in reference.values()):
        return ["the row observes nothing"]
    column, wrong = COLUMNS["bf16" if row.loose else column_name], []
    for rank, found in enumerate(ranks):
        if isinstance(found, Raised):
            wrong.append(f"rank {rank} {_told(found)}")
        else:
            told = found if rank == 0 else {name: value for name, value in found.items() if value is not None}
            expected = reference if rank == 0 else {name: reference.get(name) for name in told}
            wrong += [f"rank {rank}: {text}" for text in differences(told, expected, column.rtol, column.atol)]
    return wrong[:MAX_DIFFERENCES]


def _told(found: Observation | Raised) -> str:
    return f"raised {found.kind}: {found.message[:1500]}" if isinstance(found, Raised) else "went through"


def differences(found: Any, expected: Any, rtol: float, atol: float, where: str = "") -> list[str]:
    """Each place in which two observations differ.

    Tensors and floats are compared by tolerances, anything else exactly.
    """
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        if found.keys() != expected.keys():
            return [f"{where} has {sorted(map(str, found))}, expected {sorted(map(str, expected))}"]
        return [text for key in found for text in differences(found[key], expected[key], rtol, atol, f"{where}[{key}]")]
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return [f"{where} has {len(found)} entries {found}, expected {len(expected)} {expected}"[:1500]]
        pairs = enumerate(zip(found, expected, strict=True))
        return [text for index, (a, b) in pairs for text in differences(a, b, rtol, atol, f"{where}[{index}]")]
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.shape != expected.shape:
            return [f"{where} is {list(found.shape)}, expected {list(expected.shape)}"]
        gap = (found.double() - expected.double()).abs()
        worst = (gap - rtol * expected.double().abs()).max().item() if gap.numel() else 0.0
        return [] if worst <= atol else [f"{where} deviates by {gap.max():.3g}"]
    if isinstance(found, float) and isinstance(expected, float):
        close = math.isclose(found, expected, rel_tol=rtol, abs_tol=atol) or (
            math.isnan(found) and math.isnan(expected)
        )
        return [] if close else [f"{where} is {found!r}, expected {expected!r}"]
    return [] if found == expected else [f"{where} is {found!r}, expected {expected!r}"[:1500]]
