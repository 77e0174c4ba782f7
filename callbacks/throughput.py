"""ThroughputMonitor: tokens per second, model TFLOP/s and MFU of training, measured without stopping the device.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from olmoe_lightning.callbacks._logging import log_scalars, logged_step
from olmoe_lightning.callbacks.peaks import matmul_kind, peak_flops
from olmoe_lightning.errors import UserError, UserTypeError

PROGRESS_BAR_NAME = "tok/s/device"


class ThroughputMonitor(Callback):
    """Logs how fast training is, leaving out what is not training.

    A window runs from one report to the next, always over whole optimizer steps, so that accumulated batches and the
    optimizer's own time are in it. Time spent in validation and in writing checkpoints is cut out, together with the
    gap around it from the end of the last batch to the start of the next; the sanity check and the first steps
    (warm-up, compilation) are before the first window. Loading data, logging and other callbacks count: they are part
    of the speed.

    On CUDA, events are recorded and read when they have passed, at the latest one window later, so that the host never
    waits for the device. The window that is open when training ends is reported then.

    Reported under ``throughput/``, see ``docs/monitoring.md``: ``tokens_per_second`` (all ranks),
    ``tokens_per_second_per_device`` (also in the progress bar), ``supervised_tokens_per_second``,
    ``routed_tokens_per_second``, ``tflops_per_device``, ``mfu``, ``step_seconds``.

    Args:
        every_n_steps: optimizer steps between reports; ``None`` for the trainer's ``log_every_n_steps``.
        warmup_steps: optimizer steps after the start, or after a resume, that are not measured.
        peak_tflops: peak of one device in TFLOP/s for the MFU; ``None`` for the table in ``peaks.py`` (a CPU is
            measured).

    Raises:
        UserError: a number is out of range.
        UserTypeError: batches have no ``input_ids``.
    """

    reads_weights_between_steps = False

    def __init__(
        self, every_n_steps: int | None = None, warmup_steps: int = 3, peak_tflops: float | None = None
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"every_n_steps ({every_n_steps}) must be at least 1")
        if warmup_steps < 0:
            raise UserError(f"warmup_steps ({warmup_steps}) must not be negative")
        if peak_tflops is not None and peak_tflops <= 0:
            raise UserError(f"peak_tflops ({peak_tflops}) must be positive")
        self.every_n_steps = every_n_steps
        self.warmup_steps = warmup_steps
        self.peak_tflops = peak_tflops
        self.latest: dict[str, float] = {}
        """The newest report, by metric name; empty before the first."""
        self._clock: _HostClock | _CudaClock = _HostClock()
        self._peak_flops: float | None = None
        self._flops_per_token: dict[int, float] = {}
        self._window: _Window | None = None
        self._finished: deque[_Window] = deque()
        self._step = 0
        self._first_step = 0
        self._interrupted = False
        self._saved: tuple[Any, ...] = ()
        self._checked = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Also after a resume: clocks and windows never reach over a restart.
        device = trainer.strategy.root_device
        self._clock = _CudaClock() if device.type == "cuda" else _HostClock()
        self._window = None
        self._finished.clear()
        self._flops_per_token.clear()
        self._step = trainer.global_step
        self._first_step = trainer.global_step + self.warmup_steps
        self._interrupted = False
        self._saved = _saved_checkpoints(trainer)
        self.latest = {}
        self._checked = False
        has_flops = hasattr(getattr(pl_module, "config", None), "flops_per_token")
        self._peak_flops = self._find_peak(trainer, device) if has_flops else None
        if not self.warmup_steps:
            self._window = _Window(self._clock.mark())

    def _find_peak(self, trainer: Trainer, device: torch.device) -> float | None:
        if self.peak_tflops is not None:
            return self.peak_tflops * 1e12
        kind = matmul_kind(str(trainer.precision), device)
        peak = peak_flops(device, kind)
        if peak is None:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            rank_zero_info(
                f"MFU is not shown: the {kind} peak of {name!r} is not known; pass it "
                "as ThroughputMonitor(peak_tflops=...)."
            )
        return peak

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        saved = _saved_checkpoints(trainer)
        if (self._interrupted or saved != self._saved) and self._window is not None:
            self._window.skip_to(self._clock.mark())
        self._interrupted = False
        self._saved = saved

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = self._clock.mark()
        if not self._checked:
            self._check_parts(pl_module, outputs, batch)
        stepped = trainer.global_step != self._step
        self._step = trainer.global_step
        if self._window is None:
            if stepped and self._step >= self._first_step:
                self._window = _Window(now)
            return
        self._count(self._window, pl_module, outputs, batch, stepped)
        self._window.batch_end = now
        if stepped and self._step % self._report_interval(trainer) == 0:
            self._finish_window(trainer)
            self._window = _Window(now)
            while self._finished and self._clock.passed(self._finished[0].batch_end):
                self._report(trainer, self._finished.popleft())
                device_rate = self.latest["throughput/tokens_per_second_per_device"]
                pl_module.log_dict(self.latest, logger=False, batch_size=1)
                pl_module.log(PROGRESS_BAR_NAME, float(round(device_rate)), prog_bar=True, logger=False, batch_size=1)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupted = True

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._interrupted = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is not None and self._window.steps:
            self._finish_window(trainer)
        self._window = None
        while self._finished:
            window = self._finished.popleft()
            self._clock.wait(window.batch_end)
            self._report(trainer, window)

    def _report_interval(self, trainer: Trainer) -> int:
        return self.every_n_steps or int(getattr(trainer, "log_every_n_steps", 0)) or 50

    def _check_parts(self, pl_module: LightningModule, outputs: Any, batch: Any) -> None:
        """Say once what cannot be shown, and what it needs."""
        self._checked = True
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise UserTypeError(
                "ThroughputMonitor counts the tokens of batch['input_ids'], a tensor [B, S]; "
                f"this batch is a {type(batch).__name__} without it"
            )
        missing = []
        if not hasattr(getattr(pl_module, "config", None), "flops_per_token"):
            missing.append("TFLOP/s and MFU (need an attribute `config` with a method flops_per_token(seq_len))")
        if not isinstance(outputs, Mapping) or "num_tokens" not in outputs:
            missing.append("supervised tokens (need training_step to return {'loss': ..., 'num_tokens': ...})")
        if not hasattr(pl_module, "routing_stats"):
            missing.append("routed tokens (need an attribute `routing_stats` with `num_tokens`)")
        if missing:
            rank_zero_warn(f"ThroughputMonitor cannot show for {type(pl_module).__name__}: {'; '.join(missing)}.")

    def _count(self, window: _Window, pl_module: LightningModule, outputs: Any, batch: Any, stepped: bool) -> None:
        tokens, seq_len = batch["input_ids"].numel(), batch["input_ids"].shape[1]
        window.tokens += tokens
        window.steps += stepped
        config: Any = getattr(pl_module, "config", None)
        if hasattr(config, "flops_per_token"):
            if seq_len not in self._flops_per_token:
                self._flops_per_token[seq_len] = float(config.flops_per_token(seq_len))
            window.flops += tokens * self._flops_per_token[seq_len]
        if isinstance(outputs, Mapping):
            window.add_count("supervised", outputs.get("num_tokens"))
        window.add_count("routed", getattr(getattr(pl_module, "routing_stats", None), "num_tokens", None))

    def _finish_window(self, trainer: Trainer) -> None:
        assert self._window is not None
        self._window.logged_step = logged_step(trainer)
        # The copy comes before a new last mark: once that mark has passed, the counts have arrived.
        if self._window.fetch_counts():
            self._window.close()
            self._window.batch_end = self._clock.mark()
        else:
            self._window.close()
        self._finished.append(self._window)

    def _report(self, trainer: Trainer, window: _Window) -> None:
        seconds = sum(self._clock.seconds(start, end) for start, end in window.segments)
        # Ranks of one pipeline see the same tokens, so the world size would count them again and again.
        sampler = trainer.distributed_sampler_kwargs or {}
        data_parallel = int(sampler.get("num_replicas", 1))
        share = data_parallel / trainer.world_size
        values = {
            "tokens_per_second": window.tokens * data_parallel / seconds,
            "tokens_per_second_per_device": window.tokens * share / seconds,
            "step_seconds": seconds / window.steps,
        }
        for name, count in window.fetched_counts().items():
            values[f"{name}_tokens_per_second"] = count * data_parallel / seconds
        if window.flops:
            flops = window.flops * share / seconds
            values["tflops_per_device"] = flops / 1e12
            if self._peak_flops is not None:
                values["mfu"] = flops / self._peak_flops
        self.latest = {f"throughput/{name}": value for name, value in values.items()}
        log_scalars(trainer, self.latest, window.logged_step)  # under its own step, also when it was read later


class _Window:
    """What happened between two reports: stretches of training time, and counts that stay on the device."""

    def __init__(self, start: Any) -> None:
        self.segments: list[tuple[Any, Any]] = []
        self.batch_end = start
        self.tokens = 0
        self.steps = 0
        self.flops = 0.0
        self.logged_step = 0
        self._start = start
        self._counts: dict[str, Tensor] = {}
        self._fetched: Tensor | None = None

    def skip_to(self, now: Any) -> None:
        """Leave out the time from the end of the last batch till now."""
        self.segments.append((self._start, self.batch_end))
        self._start = self.batch_end = now

    def close(self) -> None:
        self.segments.append((self._start, self.batch_end))

    def add_count(self, name: str, count: Any) -> None:
        if count is None:
            return
        count = torch.as_tensor(count).detach().to(torch.int64)
        self._counts[name] = self._counts[name] + count if name in self._counts else count

    def fetch_counts(self) -> bool:
        """Start the copy of the counts to the host; whether the device is still at it when this returns."""
        if not self._counts:
            return False
        device = max((count.device for count in self._counts.values()), key=lambda device: device.type == "cuda")
        counts = torch.stack([count.to(device) for count in self._counts.values()])
        if counts.device.type != "cuda":
            self._fetched = counts.cpu()
            return False
        self._fetched = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        self._fetched.copy_(counts, non_blocking=True)
        return True

    def fetched_counts(self) -> dict[str, float]:
        return dict(zip(self._counts, self._fetched.tolist(), strict=True)) if self._fetched is not None else {}


class _HostClock:
    """Time of the host, for devices that compute while the host waits."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        return None

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _CudaClock:
    """Time of the device's current stream: a mark is an event that passes when the work queued before it is done."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000


def _saved_checkpoints(trainer: Trainer) -> tuple[Any, ...]:
    """Changes when a checkpoint callback has saved. Checkpoints of weights only call no ``on_save_checkpoint``."""
    return tuple(
        (
            getattr(c, "best_model_path", None),
            getattr(c, "last_model_path", None),
            tuple(getattr(c, "best_k_models", ())),
        )
        for c in trainer.checkpoint_callbacks
    )
