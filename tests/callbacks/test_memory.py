import mmap

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from olmoe_lightning.callbacks import MemoryMonitor
from olmoe_lightning.callbacks.memory import GIB, read_memory

CPU = torch.device("cpu")


def peak_can_be_reset() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("0")  # an unknown number: refused with EINVAL when writing is allowed
    except OSError as error:
        return error.errno == 22
    return True


def touched_pages(mebibytes: int) -> np.ndarray:
    """Memory straight from the system: an allocator may give back a block that is resident already."""
    block = np.frombuffer(mmap.mmap(-1, mebibytes * 2**20), dtype=np.uint8)
    block[:] = 1
    return block


class Spike(Callback):
    """Holds 256 MiB for a moment in the third step, and keeps the report of every step."""

    def __init__(self, monitor) -> None:
        self.monitor, self.reports = monitor, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 2:
            touched_pages(256)

    def on_train_batch_end(self, trainer, *_) -> None:
        self.reports.append(dict(self.monitor.latest))


def test_cpu_memory_is_resident_size_and_its_peak():
    before = read_memory(CPU)["rss"]
    block = touched_pages(64)
    after = read_memory(CPU)
    assert after["rss"] - before > 48 * 2**20  # other memory may have been given back meanwhile
    assert after["rss_peak"] >= after["rss"]
    del block


@pytest.mark.skipif(not peak_can_be_reset(), reason="this system does not let a process reset its peak resident size")
def test_peak_belongs_to_its_window(make_trainer, small_moe, random_tokens):
    monitor = MemoryMonitor(every_n_steps=1)
    spike = Spike(monitor)
    make_trainer(monitor, spike, max_steps=5).fit(small_moe(), random_tokens())
    peaks = [report["memory/rss_peak_gib"] for report in spike.reports]
    assert peaks[2] - peaks[1] > 0.9 * 256 * 2**20 / GIB
    assert peaks[2] - peaks[3] > 0.9 * 256 * 2**20 / GIB
    assert monitor.peak_gib == max(peaks)


def test_reports_reach_callback_metrics_and_the_last_part_is_not_lost(make_trainer, small_moe, random_tokens):
    monitor = MemoryMonitor(every_n_steps=2)
    trainer = make_trainer(monitor, max_steps=2)
    trainer.fit(small_moe(), random_tokens())
    assert 0 < trainer.callback_metrics["memory/rss_gib"] <= trainer.callback_metrics["memory/rss_peak_gib"]
    short = MemoryMonitor(every_n_steps=50)
    make_trainer(short, max_steps=2).fit(small_moe(), random_tokens())
    assert short.latest["memory/rss_peak_gib"] > 0


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match=r"every_n_steps \(0\)"):
        MemoryMonitor(every_n_steps=0)
