"""Start the processes of a comparison on this machine, wait for them, compare."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from olmoe_lightning.errors import UserError
from olmoe_lightning.plugins.comm.registry import make_comm
from olmoe_lightning.tools.parity.case import ParityCase
from olmoe_lightning.tools.parity.compare import Row, compare
from olmoe_lightning.tools.parity.fault_injection import Fault, check_fault
from olmoe_lightning.tools.parity.record import record
from olmoe_lightning.tools.processes import WorkerError, Workers


class ParityError(RuntimeError):
    """A process failed or did not end in time; the message holds its output."""


def run_parity(
    case: ParityCase,
    fault: Fault | None = None,
    timeout: float = 120.0,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Train a case in one process and in those of the topology, all on this machine, and compare.

    Args:
        case: what to compare.
        fault: make this mistake in the topology; some rows must deviate then.
        timeout: seconds after their start, at which the processes are ended.
        progress: gets what goes on, in lines.

    Returns:
        The table.

    Raises:
        UserError: the comm plugin cannot be used, the fault would be without effect, or there is no time.
        ParityError: a process failed or hung.
    """
    if timeout <= 0:
        raise UserError(f"timeout ({timeout}) must be positive, in seconds")
    device = torch.device("cuda" if case.accelerator == "gpu" else "cpu")
    make_comm(case.comm, case.expert_parallel, device)
    if fault is not None:
        check_fault(case, fault)
    begin = time.monotonic()
    mesh = case.mesh
    stages = f"pipeline {mesh.pipeline} ({case.schedule}) x " if mesh.pipeline > 1 else ""
    progress(
        f"{case.steps} steps; reference: 1 process, {case.accumulate * case.parts} microbatches a step; topology: "
        f"{case.devices} processes, {stages}expert_replica {mesh.expert_replica} x expert {mesh.expert}, "
        f"{case.accumulate * case.num_microbatches} each"
    )
    reference = Workers(1, backend=None, quiet=True, environment=os.environ)
    topology = Workers(case.devices, backend=None, quiet=True, environment=os.environ)
    records = []
    with reference, topology:
        try:
            reference.begin(record, case, alone=True)
            topology.begin(record, case, fault=fault)
            end = time.monotonic() + timeout
            for name, workers in (("reference", reference), ("topology", topology)):
                records.append(workers.results(max(end - time.monotonic(), 1e-3))[0])
                progress(f"{time.monotonic() - begin:5.1f} s  the {name} is done")
        except WorkerError as error:
            raise ParityError(str(error)) from error
    return compare(records[0], records[1], case.bound)
