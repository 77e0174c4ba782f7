"""MemoryMonitor: how much memory a step needs at its peak."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from olmoe_lightning.callbacks._logging import log_scalars, logged_step
from olmoe_lightning.errors import UserError

GIB = 1024**3


class MemoryMonitor(Callback):
    """Logs the peak memory of every window between two reports, in GiB, of rank 0.

    On CUDA: ``memory/active_peak_gib`` (blocks in use, or waiting for another stream: what the step needs) and
    ``memory/reserved_peak_gib`` (what the allocator took from the device). On a CPU: ``memory/rss_gib`` (resident set
    now) and ``memory/rss_peak_gib``. Peaks start anew after each report where the system lets them: on CUDA always,
    on a CPU under Linux; elsewhere the CPU's peak is that of the process. Reading them does not wait for the device.
    Validation and checkpoints count to the window they fall in.

    Args:
        every_n_steps: optimizer steps between reports; ``None`` for the trainer's ``log_every_n_steps``.

    Raises:
        UserError: ``every_n_steps`` is below 1.
    """

    reads_weights_between_steps = False

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"every_n_steps ({every_n_steps}) must be at least 1")
        self.every_n_steps = every_n_steps
        self.latest: dict[str, float] = {}
        """The newest report, by metric name."""
        self.peak_gib = 0.0
        """The highest peak of all windows so far: active memory on CUDA, resident set on a CPU."""
        self._step = 0
        self._reported_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = self._reported_step = trainer.global_step
        self.peak_gib = 0.0
        _reset_peaks(trainer.strategy.root_device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = trainer.global_step != self._step
        self._step = trainer.global_step
        interval = self.every_n_steps or int(getattr(trainer, "log_every_n_steps", 0)) or 50
        if stepped and self._step % interval == 0:
            self._report(trainer)
            pl_module.log_dict(self.latest, logger=False, batch_size=1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._step != self._reported_step:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        device = trainer.strategy.root_device
        gib = {name: size / GIB for name, size in read_memory(device).items()}
        self.latest = {f"memory/{name}_gib": value for name, value in gib.items()}
        self.peak_gib = max(self.peak_gib, gib["active_peak"] if device.type == "cuda" else gib.get("rss_peak", 0.0))
        self._reported_step = self._step
        _reset_peaks(device)
        log_scalars(trainer, self.latest, logged_step(trainer))


def read_memory(device: torch.device) -> dict[str, int]:
    """Bytes in use: ``active_peak``, ``reserved_peak`` of a CUDA device, else ``rss``, ``rss_peak`` of the process.

    What the system does not report is left out.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "active_peak": stats.get("active_bytes.all.peak", 0),
            "reserved_peak": stats.get("reserved_bytes.all.peak", 0),
        }
    readers: tuple[Callable[[], dict[str, int]], ...] = (_read_proc, _read_rusage)
    return next((values for read in readers if (values := read())), {})


def _read_proc() -> dict[str, int]:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    names = {"VmRSS": "rss", "VmHWM": "rss_peak"}
    return {names[key]: value * 1024 for key, value in kib.items()}


def _read_rusage() -> dict[str, int]:
    if sys.platform == "win32":
        return {}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rss_peak": peak if sys.platform == "darwin" else peak * 1024}  # macOS counts bytes, the others KiB


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # 5 sets the process's VmHWM back to its VmRSS (Linux, proc(5)). Some containers forbid it; then the peak goes on.
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
