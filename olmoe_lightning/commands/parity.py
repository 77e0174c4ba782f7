"""``olmoe-lightning parity``: the table of deviations from one process."""

from __future__ import annotations

import sys
from typing import Any

from olmoe_lightning.tools.parity import Fault, ParityCase, ParityError, format_table, run_parity


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
