"""The table as the page shows it.

``python tests/lightning_contract/render.py`` writes it anew, between its two markers in ``docs/strategy.md``.
"""

import os
import sys
from pathlib import Path
from textwrap import wrap

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    os.environ["TRITON_INTERPRET"] = "1"

import features  # noqa: F401  (fills the table)
from contract import ROWS, Row
from laboratory import COLUMNS

PAGE = Path(__file__).parents[2] / "docs" / "strategy.md"
WIDTH = 130
BEGIN, END = "<!-- contract: begin -->", "<!-- contract: end -->"


def rendered() -> str:
    """Groups with what is equal in all columns, then a table of everything else."""
    groups: dict[str, list[Row]] = {}
    for row in ROWS.values():
        groups.setdefault(row.group, []).append(row)
    cells = len(ROWS) * len(COLUMNS)
    refused = sum(len(row.refused) for row in ROWS.values())
    lines = [
        f"{len(ROWS)} features in {len(COLUMNS)} columns: {cells - refused} cells are equal, {refused} refused.",
        "",
    ]
    for group, rows in groups.items():
        equal = [row.name for row in rows if not row.refused and not row.differs]
        text = f"**{group}** ({len(rows)} features). Equal in all columns: {'; '.join(equal)}."
        lines += [*wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    lines += ["What is refused (the words are from the sentence), or other than in plain Lightning:", ""]
    lines += [f"| feature | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    notes: list[str] = []
    for row in ROWS.values():
        if row.refused or row.differs:
            lines.append(f"| {row.name} | {' | '.join(_cell(row, column, notes) for column in COLUMNS)} |")
    lines += ["", *(f"- ({number}) {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines)


def _cell(row: Row, column: str, notes: list[str]) -> str:
    if column in row.refused:
        note, word = f"“{row.refused[column]}”", "refused"
    elif row.differs:
        note, word = row.differs, "stated"
    else:
        return "="
    if note not in notes:
        notes.append(note)
    return f"{word} ({notes.index(note) + 1})"


def shown(page: str) -> str:
    """What stands between the markers of a page."""
    return page.split(BEGIN)[1].split(END)[0].strip()


def with_table(page: str) -> str:
    """The page with the table of now."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{rendered()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
