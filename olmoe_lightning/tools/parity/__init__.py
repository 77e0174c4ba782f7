"""The parity lab: does training on many processes compute what one process computes?"""

from olmoe_lightning.tools.parity.case import ParityCase
from olmoe_lightning.tools.parity.compare import Row, compare, format_table
from olmoe_lightning.tools.parity.fault_injection import Fault
from olmoe_lightning.tools.parity.record import RunRecord, StepRecord, record
from olmoe_lightning.tools.parity.run import ParityError, run_parity

__all__ = [
    "Fault",
    "ParityCase",
    "ParityError",
    "Row",
    "RunRecord",
    "StepRecord",
    "compare",
    "format_table",
    "record",
    "run_parity",
]
