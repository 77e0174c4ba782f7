import csv
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch.overrides import TorchFunctionMode

from olmoe_lightning.callbacks import ExpertLoadMonitor, ThroughputMonitor
from olmoe_lightning.callbacks.throughput import PROGRESS_BAR_NAME

TOKENS = 2 * 16
SUPERVISED = 2 * 14
# A training step sleeps for 0.01 s, and what is excluded for 0.3 s and more beside every step: a mean step would take
# more than 0.25 s with it.
EXCLUDED_S = 0.3
LIMIT_S = 0.2


@pytest.fixture
def time_of_sleep(monkeypatch):
    """Time passes in ``sleep``, which takes none, and a little at each look at the clock, however fast the machine."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def look():
        sleep(1e-4)
        return now[0]

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr("olmoe_lightning.callbacks.throughput.time", SimpleNamespace(perf_counter=look))


class SlowIO(TorchCheckpointIO):
    saves = 0

    def save_checkpoint(self, *args, **kwargs) -> None:
        self.saves += 1
        time.sleep(EXCLUDED_S)
        super().save_checkpoint(*args, **kwargs)


def read(monitor: ThroughputMonitor) -> dict[str, float]:
    return {name.removeprefix("throughput/"): value for name, value in monitor.latest.items()}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rates_are_the_counted_tokens_over_the_measured_time(make_trainer, small_moe, random_tokens, accumulate):
    monitor = ThroughputMonitor(warmup_steps=1, peak_tflops=2.0)
    trainer = make_trainer(monitor, accumulate_grad_batches=accumulate)
    module = small_moe(train_seconds=0.01)
    trainer.fit(module, random_tokens())
    values = read(monitor)
    # One window is measured by one clock, so these relations are exact up to rounding.
    per_step = values["tokens_per_second"] * values["step_seconds"]
    assert per_step == pytest.approx(TOKENS * accumulate, rel=1e-6)
    assert values["tokens_per_second_per_device"] == values["tokens_per_second"]
    ratio = SUPERVISED / TOKENS
    assert values["supervised_tokens_per_second"] == pytest.approx(ratio * values["tokens_per_second"], rel=1e-6)
    assert values["routed_tokens_per_second"] == pytest.approx(ratio * values["tokens_per_second"], rel=1e-6)
    flops = module.config.flops_per_token(16) * values["tokens_per_second"]
    assert values["tflops_per_device"] == pytest.approx(flops / 1e12, rel=1e-6)
    assert values["mfu"] == pytest.approx(flops / 2e12, rel=1e-6)
    assert values["step_seconds"] >= 0.01 * accumulate
    assert trainer.progress_bar_metrics[PROGRESS_BAR_NAME] == pytest.approx(values["tokens_per_second"], abs=1)


@pytest.mark.usefixtures("time_of_sleep")
def test_validation_and_sanity_check_time_is_excluded(make_trainer, small_moe, random_tokens):
    monitor = ThroughputMonitor(every_n_steps=3, warmup_steps=0)
    trainer = make_trainer(monitor, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=1)
    module = small_moe(train_seconds=0.01, val_seconds=EXCLUDED_S)
    trainer.fit(module, random_tokens())
    assert [stage for stage, _ in module.history].count("val") == 6
    assert read(monitor)["step_seconds"] < LIMIT_S


@pytest.mark.usefixtures("time_of_sleep")
@pytest.mark.parametrize("weights_only", [False, True])
def test_checkpoint_time_is_excluded(make_trainer, small_moe, random_tokens, tmp_path, weights_only):
    monitor, io = ThroughputMonitor(every_n_steps=3, warmup_steps=0), SlowIO()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_weights_only=weights_only)
    trainer = make_trainer(monitor, saver, enable_checkpointing=True, plugins=[io])
    trainer.fit(small_moe(train_seconds=0.01), random_tokens())
    assert io.saves >= 6
    assert read(monitor)["step_seconds"] < LIMIT_S


@pytest.mark.usefixtures("time_of_sleep")
def test_slow_training_steps_are_not_excluded(make_trainer, small_moe, random_tokens):
    # The negative control of the tests above: the same delay inside a training step does count.
    monitor = ThroughputMonitor(every_n_steps=2, warmup_steps=0)
    make_trainer(monitor, max_steps=2).fit(small_moe(train_seconds=EXCLUDED_S), random_tokens())
    assert read(monitor)["step_seconds"] > EXCLUDED_S


@pytest.mark.usefixtures("time_of_sleep")
def test_first_steps_are_excluded(make_trainer, small_moe, random_tokens):
    monitor = ThroughputMonitor(every_n_steps=3, warmup_steps=2)
    make_trainer(monitor, max_steps=3).fit(small_moe(slow_steps=2), random_tokens())
    assert read(monitor)["step_seconds"] < LIMIT_S


def test_a_run_that_ends_inside_a_window_reports_the_part(make_trainer, small_moe, random_tokens, tmp_path):
    monitor = ThroughputMonitor(every_n_steps=4, warmup_steps=1)
    logger = CSVLogger(tmp_path, name="", version="")
    make_trainer(monitor, max_steps=6, logger=logger, log_every_n_steps=4).fit(small_moe(), random_tokens())
    with open(tmp_path / "metrics.csv") as file:
        rows = {int(row["step"]): row["throughput/tokens_per_second"] for row in csv.DictReader(file)}
    assert set(rows) == {3, 5}
    assert float(rows[5]) == pytest.approx(monitor.latest["throughput/tokens_per_second"])


@pytest.mark.usefixtures("time_of_sleep")
def test_resume_starts_a_new_window_and_warms_up_again(make_trainer, small_moe, random_tokens, tmp_path):
    first = make_trainer(enable_checkpointing=True, max_steps=5)
    first.fit(small_moe(), random_tokens())
    first.save_checkpoint(tmp_path / "at5.ckpt")

    monitor = ThroughputMonitor(every_n_steps=2, warmup_steps=2)
    resumed = make_trainer(monitor, max_steps=9)
    resumed.fit(small_moe(slow_steps=7), random_tokens(), ckpt_path=str(tmp_path / "at5.ckpt"))
    values = read(monitor)
    assert resumed.global_step == 9
    assert values["step_seconds"] < LIMIT_S  # steps 6 and 7 took 0.4 s each
    assert values["tokens_per_second"] * values["step_seconds"] == pytest.approx(TOKENS, rel=1e-6)


class Bare(LightningModule):
    """A module that offers nothing of what the monitor uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch["input_ids"].float().mean().view(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_bare_module_gets_tokens_and_one_warning_with_what_is_missing(make_trainer, random_tokens):
    monitor = ThroughputMonitor(warmup_steps=0)
    with pytest.warns(UserWarning, match=r"cannot show for Bare: TFLOP/s .*flops_per_token.*num_tokens.*routing_stats"):
        make_trainer(monitor).fit(Bare(), random_tokens())
    assert set(read(monitor)) == {"tokens_per_second", "tokens_per_second_per_device", "step_seconds"}


def test_batches_without_input_ids_are_an_error_that_says_so(make_trainer):
    module = Bare()
    module.training_step = lambda batch, batch_idx: module.layer(batch).sum()
    loader = torch.utils.data.DataLoader(torch.ones(8, 1))
    with pytest.raises(TypeError, match=r"batch\['input_ids'\], a tensor \[B, S\]; this batch is a Tensor"):
        make_trainer(ThroughputMonitor()).fit(module, loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every_n_steps": 0}, "every_n_steps"), ({"warmup_steps": -1}, "warmup"), ({"peak_tflops": 0.0}, "peak_tflops")],
)
def test_wrong_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ThroughputMonitor(**options)


class LateClock:
    """A device that is a whole window behind the host: a mark passes when eight younger ones have been made."""

    def __init__(self) -> None:
        self.made = 0

    def mark(self) -> tuple[int, float]:
        self.made += 1
        return self.made, time.perf_counter()

    def passed(self, mark) -> bool:
        return self.made - mark[0] >= 8

    def wait(self, mark) -> None:
        return None

    def seconds(self, start, end) -> float:
        return end[1] - start[1]


def test_a_device_that_lags_is_reported_later_and_completely(
    make_trainer, small_moe, random_tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr("olmoe_lightning.callbacks.throughput._HostClock", LateClock)
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = ThroughputMonitor(every_n_steps=4, warmup_steps=0)
    module = small_moe(train_seconds=0.01)
    trainer = make_trainer(monitor, max_steps=14, logger=logger, log_every_n_steps=4)
    trainer.fit(module, random_tokens())
    with open(tmp_path / "metrics.csv") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    # Windows end with steps 4, 8, 12 and 14, and each is written under its own number (from 0), however late.
    assert steps == [3, 7, 11, 13]
    assert monitor.latest["throughput/step_seconds"] >= 0.01
    # Only the first window had passed by the last report of training.
    assert trainer.callback_metrics["throughput/step_seconds"] != pytest.approx(
        monitor.latest["throughput/step_seconds"]
    )


class NoSync(TorchFunctionMode):
    """Refuses everything that makes the host wait for a device."""

    waits = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in self.waits, "a tensor's value was read"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("monitor_class", [ThroughputMonitor, ExpertLoadMonitor])
def test_no_value_of_a_tensor_is_read_between_reports(make_trainer, small_moe, random_tokens, monitor_class):
    class Guarded(monitor_class):
        batches = 0

        def on_train_batch_end(self, *args) -> None:
            self.batches += 1
            with NoSync():
                super().on_train_batch_end(*args)

    monitor = Guarded(every_n_steps=100)
    make_trainer(monitor).fit(small_moe(), random_tokens())
    assert monitor.batches == 6
    with pytest.raises(AssertionError, match="value was read"):  # the guard works
        make_trainer(Guarded(every_n_steps=3)).fit(small_moe(), random_tokens())


class PipelineOfTwo(DDPStrategy):
    """Two ranks that see the same samples, as the stages of a pipeline do."""

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": 1, "rank": 0}


class Write(ThroughputMonitor):
    """Leaves rank 0's report in a file: the processes of a forked run are gone when ``fit`` returns."""

    def __init__(self, path) -> None:
        super().__init__(warmup_steps=1, peak_tflops=1.0)
        self.path = path

    def on_train_end(self, trainer, pl_module) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            torch.save(self.latest, self.path)


@pytest.mark.parametrize(("strategy", "replicas"), [(DDPStrategy, 2), (PipelineOfTwo, 1)])
def test_global_rates_count_data_parallel_ranks_and_not_the_world(
    make_trainer, small_moe, random_tokens, tmp_path, strategy, replicas
):
    trainer = make_trainer(Write(tmp_path / "report.pt"), devices=2, strategy=strategy(start_method="fork"))
    trainer.fit(small_moe(), random_tokens())
    values = {k.removeprefix("throughput/"): v for k, v in torch.load(tmp_path / "report.pt").items()}
    per_step = values["tokens_per_second"] * values["step_seconds"]
    assert per_step == pytest.approx(replicas * TOKENS, rel=1e-6)
    assert values["tokens_per_second_per_device"] == pytest.approx(values["tokens_per_second"] / 2, rel=1e-6)
    assert values["supervised_tokens_per_second"] * values["step_seconds"] == pytest.approx(replicas * SUPERVISED)
    assert values["mfu"] == pytest.approx(values["tflops_per_device"], rel=1e-6)  # of a peak of 1 TFLOP/s
