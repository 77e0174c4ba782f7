"""Every feature of Lightning that a user can reach does what it does in plain Lightning, or is refused with a sentence.

A test is a cell of the table. All cells of one group and column are computed in one call of shared processes, those of
the quick part in one for each column; what plain Lightning does, in a process of its own. ``make contract`` runs all.
"""

import shutil
import tempfile

import features  # noqa: F401  (fills the table)
import pytest
import render
import torch
from contract import ROWS, Raised, differences, observe, verdict
from laboratory import COLUMNS, PLAIN

from olmoe_lightning.tools.processes import WorkerError

SECONDS = 20
"""For one cell; a cell takes a fraction of one on a quiet machine."""


class Cells:
    """What rows did in each column, computed for all chosen rows of a group at once."""

    def __init__(self, workers, chosen):
        self.workers, self.chosen, self.found = workers, chosen, {}

    def get(self, row, column):
        """What each process did."""
        if (row.name, column) not in self.found:
            names = [other.name for other in self.chosen if self._batch(other) == self._batch(row)]
            try:
                self._run(names, column)
            except WorkerError:  # one of them ended a process: each by itself, to see which
                for name in names:
                    try:
                        self._run([name], column)
                    except WorkerError as error:
                        self.found[name, column] = [Raised("WorkerError", str(error)[-2000:])]
        return self.found[row.name, column]

    @staticmethod
    def _batch(row):
        return "quick" if row.quick else row.group

    def _run(self, names, column):
        folder = tempfile.mkdtemp(prefix="contract-")
        pool = self.workers((COLUMNS | PLAIN)[column].processes)
        try:
            ranks = pool.run(observe, names, column, folder, timeout=SECONDS * (1 + len(names)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.found |= {(name, column): [rank[name] for rank in ranks] for name in names}

    def wrong(self, row, column):
        """What is wrong with a cell."""
        reference = self.get(row, COLUMNS[column].reference)[0]
        return verdict(row, column, reference, self.get(row, column))


@pytest.fixture(scope="session")
def cells(workers, request):
    chosen = {item.callspec.params["row"].name for item in request.session.items if item.originalname == "test_cell"}
    return Cells(workers, [row for name, row in ROWS.items() if name in chosen])


def every_cell():
    for column in COLUMNS:
        for row in ROWS.values():
            marks = [pytest.mark.timeout(1800)] if row.quick else [pytest.mark.contract, pytest.mark.timeout(1800)]
            yield pytest.param(row, column, id=f"{column}: {row.name}", marks=marks)


@pytest.mark.parametrize(("row", "column"), every_cell())
def test_cell(cells, row, column):
    wrong = cells.wrong(row, column)
    assert not wrong, "\n".join(wrong)


def test_the_page_shows_the_table():
    text = render.rendered()
    assert render.shown(render.PAGE.read_text()) == text, "python tests/lightning_contract/render.py writes it anew"


def test_the_table_is_large_enough_and_has_every_group_in_its_quick_part():
    assert len(ROWS) >= 120
    assert {row.group for row in ROWS.values() if row.quick} >= {"Loops", "Callbacks", "Hooks", "Data", "Checkpoints"}


# Negative controls: the harness sees what is wrong.

EQUAL = next(row for row in ROWS.values() if not row.refused)
REFUSED = next(row for row in ROWS.values() if len(row.refused) == len(COLUMNS))
SEEN = {"weights": {"w": torch.tensor([1.0, -2.0])}, "steps": 4, "metrics": {"loss": 0.5}, "hooks": ["a", "b"]}


def changed(**values):
    return [{**SEEN, **values}]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    "found",
    [
        changed(weights={"w": torch.tensor([1.0, -2.3])}),
        changed(weights={}),
        changed(weights={"w": torch.tensor([1.0])}),
        changed(weights={"w": torch.tensor([1.0, float("nan")])}),
        changed(weights=None),
        changed(steps=5),
        changed(steps=None),
        changed(metrics={"loss": 0.6}),
        changed(metrics={"loss": float("nan")}),
        changed(hooks=["b", "a"]),
        changed(hooks=["a"]),
        changed(more=1),
        [SEEN, {"steps": 5}],
        [SEEN, {"unknown": 5}],
        [Raised("ValueError", "any")],
    ],
)
def test_a_deviation_is_reported(column, found):
    assert verdict(EQUAL, column, SEEN, found)
    assert not verdict(EQUAL, column, SEEN, [SEEN, {"steps": 4, "weights": None}])


@pytest.mark.parametrize("nothing", [{}, {"weights": None}, {"seen": [], "metrics": {}}, Raised("ValueError", "any")])
def test_a_row_that_observes_nothing_is_reported(nothing):
    assert verdict(EQUAL, "DP 2", nothing, [nothing, nothing])


def test_a_refusal_that_does_not_come_is_reported():
    words = REFUSED.refused["DP 2"]
    assert not verdict(REFUSED, "DP 2", SEEN, [Raised("Error", f"so: {words}")] * 2)
    for rank_1 in (SEEN, Raised("Error", "something else")):
        assert verdict(REFUSED, "DP 2", SEEN, [Raised("Error", f"so: {words}"), rank_1])


def test_small_deviations_are_seen_in_fp32_and_allowed_in_bf16():
    found = {"w": torch.tensor([1.0, -2.001])}
    expected = {"w": torch.tensor([1.0, -2.0])}
    assert differences(found, expected, COLUMNS["DP 2"].rtol, COLUMNS["DP 2"].atol)
    assert not differences(found, expected, COLUMNS["bf16"].rtol, COLUMNS["bf16"].atol)
