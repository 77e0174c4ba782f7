"""Lightning's hooks reach strategy, module and callbacks in the order in which they always did.

The files in golden/ hold it; ``pytest tests/lightning_contract --record-hooks`` writes them anew. Do that after a new
version of Lightning, and read the difference before it is committed.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
from hook_trace import trace_run

from olmoe_lightning import MoEStrategy
from olmoe_lightning.tools.processes import WorkerError

GOLDEN = Path(__file__).parent / "golden"
RUNS = ["fit", "validate", "resume", "failing_rank"]


def orders(workers, run, folder, strategy_kind=MoEStrategy):
    """What golden files hold: one list of calls, or one for each rank where they differ."""
    failure = pytest.raises(WorkerError, match="ZeroDivisionError: rank 1 fails")
    with failure if run == "failing_rank" else nullcontext():
        workers(2).run(trace_run, run, str(folder), strategy_kind)
    first, second = ((folder / f"rank{rank}.txt").read_text() for rank in (0, 1))
    return first if first == second else f"# rank 0\n{first}\n# rank 1\n{second}"


@pytest.mark.parametrize("run", RUNS)
def test_hooks_come_in_the_recorded_order(workers, tmp_path, run, request):
    found, golden = orders(workers, run, tmp_path), GOLDEN / f"{run}.txt"
    if request.config.getoption("--record-hooks", default=False):
        golden.write_text(found)
    assert found.splitlines() == golden.read_text().splitlines()


class OptimizersFirst(MoEStrategy):
    """Asks the module for its optimizer before the module is on its device."""

    def setup(self, trainer):
        self.setup_optimizers(trainer)
        super().setup(trainer)


class AccumulatesItself(MoEStrategy):
    """Lightning does not tell it which backward passes are not the last of a step."""

    handles_gradient_accumulation = True


@pytest.mark.parametrize("strategy_kind", [OptimizersFirst, AccumulatesItself])
def test_another_order_of_hooks_is_noticed(workers, tmp_path, strategy_kind):
    found = orders(workers, "fit", tmp_path, strategy_kind)
    assert found.splitlines() != (GOLDEN / "fit.txt").read_text().splitlines()
