import math

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from olmoe_lightning import MoEStrategy
from olmoe_lightning.callbacks import ExpertLoadMonitor
from olmoe_lightning.callbacks.expert_load import RoutingSums, load_metrics
from olmoe_lightning.callbacks.heat_map import draw_heat_map
from olmoe_lightning.plugins.comm import CommSpec, DropCounters
from olmoe_lightning.plugins.comm.capacity import describe_drops

METRICS = ("max_over_mean", "dead_experts", "load_entropy", "router_entropy", "balance_loss", "centred_product")


def events(directory) -> EventAccumulator:
    found = EventAccumulator(str(directory), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    return found


def expected_max_over_mean(batches) -> list[float]:
    counts = sum(stats.counts for stats in batches).double()
    return (counts.amax(-1) / counts.mean(-1)).tolist()


def sums(counts, probabilities) -> RoutingSums:
    """Sums of one layer from token rows: counts [E], probabilities [T, E]."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    counts = torch.tensor([counts], dtype=torch.float64)
    return RoutingSums(counts, p.sum(0)[None], torch.special.entr(p).sum()[None], torch.tensor([0.0]))


def test_six_tokens_lower_the_balance_loss_below_one_while_load_is_uneven():
    # Two rows (1, 0) and four rows (0.4, 0.6), top-1: f = (1/3, 2/3), P = (3/5, 2/5), so E f·P = 14/15.
    values = load_metrics(sums([2, 4], [[1.0, 0.0]] * 2 + [[0.4, 0.6]] * 4), top_k=1)
    assert values["centred_product"].item() == pytest.approx(14 / 15 - 1)
    assert values["max_over_mean"].item() == pytest.approx(4 / 3)
    entropy = -(1 / 3 * math.log(1 / 3) + 2 / 3 * math.log(2 / 3)) / math.log(2)
    assert values["load_entropy"].item() == pytest.approx(entropy)
    assert values["router_entropy"].item() == pytest.approx(-4 / 6 * (0.4 * math.log(0.4) + 0.6 * math.log(0.6)))


def test_perfect_balance_and_full_collapse_are_the_ends_of_the_scale():
    even = load_metrics(sums([2, 2, 2, 2], [[0.25] * 4] * 4), top_k=2)
    assert even["max_over_mean"].item() == 1
    assert even["load_entropy"].item() == pytest.approx(1)
    assert even["centred_product"].item() == pytest.approx(0)
    assert even["router_entropy"].item() == pytest.approx(math.log(4))
    collapsed = load_metrics(sums([4, 4, 0, 0], [[0.5, 0.5, 0.0, 0.0]] * 4), top_k=2)
    assert collapsed["max_over_mean"].item() == 2
    assert collapsed["dead_experts"].item() == 2
    assert collapsed["load_entropy"].item() == pytest.approx(0.5)
    assert collapsed["centred_product"].item() == pytest.approx(1)  # E f·P = 2


def test_training_windows_hold_every_accumulated_batch_and_nothing_of_the_sanity_check(
    make_trainer, small_moe, random_tokens, tmp_path
):
    monitor = ExpertLoadMonitor(every_n_steps=2, heatmaps=False)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    module = small_moe()
    make_trainer(
        monitor, logger=logger, max_steps=5, accumulate_grad_batches=2, limit_val_batches=1, num_sanity_val_steps=1
    ).fit(module, random_tokens(batches=10))
    assert module.history[0][0] == "sanity"
    train = [stats for stage, stats in module.history if stage == "train"]
    assert len(train) == 10
    found = events(tmp_path)
    # Two steps of two batches each; the last window holds the fifth step alone.
    windows = {1: train[0:4], 3: train[4:8], 4: train[8:10]}
    for layer in (0, 1):
        scalars = {s.step: s.value for s in found.Scalars(f"load/layer_{layer + 1:02d}/max_over_mean")}
        # TensorBoard stores FP32.
        assert scalars == {
            step: pytest.approx(expected_max_over_mean(batches)[layer], rel=1e-6) for step, batches in windows.items()
        }


def test_validation_is_a_window_of_its_own(make_trainer, small_moe, random_tokens, tmp_path):
    monitor = ExpertLoadMonitor(every_n_steps=4, heatmaps=False)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    module = small_moe()
    trainer = make_trainer(monitor, logger=logger, max_steps=4, limit_val_batches=2, val_check_interval=2)
    trainer.fit(module, random_tokens())
    stages = [stage for stage, _ in module.history]
    assert stages == ["sanity"] * 2 + ["train"] * 2 + ["val"] * 2 + ["train"] * 2 + ["val"] * 2
    batches = [stats for _, stats in module.history]
    found = events(tmp_path)
    scalars = {s.step: s.value for s in found.Scalars("val_load/max_over_mean_worst")}
    assert scalars == {
        1: pytest.approx(max(expected_max_over_mean(batches[4:6])), rel=1e-6),
        3: pytest.approx(max(expected_max_over_mean(batches[8:10])), rel=1e-6),
    }
    (train,) = found.Scalars("load/max_over_mean")
    expected = expected_max_over_mean(batches[2:4] + batches[6:8])
    assert train.value == pytest.approx(sum(expected) / 2, rel=1e-6)
    assert trainer.callback_metrics["load/max_over_mean"] == pytest.approx(train.value, rel=1e-6)
    assert trainer.callback_metrics["val_load/max_over_mean_worst"] == pytest.approx(scalars[3], rel=1e-6)


def test_all_metrics_are_logged_once_per_report_for_layers_mean_and_worst(
    make_trainer, small_moe, random_tokens, tmp_path
):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    monitor = ExpertLoadMonitor(every_n_steps=3, heatmaps=False)
    make_trainer(monitor, logger=logger, log_every_n_steps=1).fit(small_moe(), random_tokens())
    found = events(tmp_path)
    expected = {f"load/{place}{metric}" for metric in METRICS for place in ("layer_01/", "layer_02/", "")}
    expected |= {f"load/{metric}_worst" for metric in METRICS}
    tags = {tag for tag in found.Tags()["scalars"] if tag.startswith("load/")}
    assert tags == expected  # block 0 is dense and has no load
    assert all([s.step for s in found.Scalars(tag)] == [2, 5] for tag in tags)
    assert set(monitor.latest) == expected


def test_every_tensorboard_of_several_loggers_gets_pictures(make_trainer, small_moe, random_tokens, tmp_path):
    loggers = [
        TensorBoardLogger(tmp_path, name="a"),
        CSVLogger(tmp_path, name="b"),
        TensorBoardLogger(tmp_path, name="c"),
    ]
    monitor = ExpertLoadMonitor(every_n_steps=2, heatmap_every_n_steps=4)
    trainer = make_trainer(monitor, logger=loggers, limit_val_batches=1, val_check_interval=6)
    trainer.fit(small_moe(), random_tokens())
    for logger in (loggers[0], loggers[2]):
        found = events(logger.log_dir)
        assert [image.step for image in found.Images("load/heat_map")] == [3]
        assert [image.step for image in found.Images("val_load/heat_map")] == [5]


def test_loggers_without_pictures_are_told_once(make_trainer, small_moe, random_tokens, tmp_path, caplog):
    make_trainer(ExpertLoadMonitor(every_n_steps=2), logger=CSVLogger(tmp_path)).fit(small_moe(), random_tokens())
    assert caplog.text.count("draws no heat maps") == 1


def test_heat_map_shows_dead_experts_black_and_the_fair_share_white():
    load = torch.tensor([[0.0, 0.5, 0.25, 0.25]])
    picture = draw_heat_map(load, torch.full((1, 4), 0.25), [0], "")
    assert picture.dtype.name == "uint8"
    height = picture.shape[0]
    upper, lower = picture[: height // 2].reshape(-1, 3), picture[height // 2 :].reshape(-1, 3)

    def black(pixels) -> int:
        return int((pixels == 0).all(-1).sum())

    # The dead expert fills a quarter of the upper panel; in the lower one only letters and axes are black.
    assert black(upper) > 10 * black(lower) > 0


class Recorder(Callback):
    """Leaves each rank's own sums and the monitor's report in files, from forked processes."""

    def __init__(self, monitor, directory) -> None:
        self.monitor, self.directory = monitor, directory

    def on_train_end(self, trainer, pl_module) -> None:
        own = sum(stats.counts for stage, stats in pl_module.history if stage == "train")
        torch.save((own, self.monitor.latest), self.directory / f"rank{trainer.global_rank}.pt")


def test_load_is_summed_over_ranks_and_equal_on_all(make_trainer, small_moe, random_tokens, tmp_path):
    monitor = ExpertLoadMonitor(every_n_steps=4, heatmaps=False)
    strategy = DDPStrategy(start_method="fork")
    trainer = make_trainer(monitor, Recorder(monitor, tmp_path), devices=2, strategy=strategy, max_steps=4)
    trainer.fit(small_moe(), random_tokens())
    (own_0, latest_0), (own_1, latest_1) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert latest_0 == latest_1
    total = (own_0 + own_1).double()
    expected = (total.amax(-1) / total.mean(-1)).tolist()
    assert [latest_0[f"load/layer_{n:02d}/max_over_mean"] for n in (1, 2)] == pytest.approx(expected)
    alone = (own_0.amax(-1) / own_0.double().mean(-1)).tolist()
    assert alone != pytest.approx(expected)  # or one rank's sums would pass as well


class Dense(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch["input_ids"].float().mean().view(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_without_routing_statistics_is_named_in_one_warning(make_trainer, random_tokens):
    with pytest.warns(UserWarning, match="ExpertLoadMonitor does nothing: Dense needs an attribute `routing_stats`"):
        make_trainer(ExpertLoadMonitor(every_n_steps=1)).fit(Dense(), random_tokens())


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match=r"every_n_steps \(0\)"):
        ExpertLoadMonitor(every_n_steps=0)


class Limited:
    """A communication plugin, as far as it counts: a batch adds to its counters."""

    name = "limited"

    def __init__(self):
        self.drops = DropCounters(8, 2, torch.device("cpu"))

    def drop(self, routes):
        ids, keep = torch.arange(8).view(4, 2), torch.ones(4, 2, dtype=torch.bool)
        keep.view(-1)[:routes] = False
        self.drops.add(ids, ids, keep, torch.full((4, 2), 0.25))

    def teardown(self):
        pass


class Dropping(Callback):
    """Makes the plugin one of the strategy's, and lets it drop so many routes in each step."""

    def __init__(self, by_step):
        self.plugin, self.by_step = Limited(), list(by_step)

    def on_train_start(self, trainer, *args):
        trainer.strategy._experts._comms[CommSpec(8, 2, 16, torch.float32, torch.device("cpu"))] = self.plugin

    def on_train_batch_end(self, *args):
        self.plugin.drop(self.by_step.pop(0))


def test_what_a_plugin_dropped_is_reported_by_window(make_trainer, small_moe, random_tokens, tmp_path):
    monitor = ExpertLoadMonitor(every_n_steps=2, heatmaps=False)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = make_trainer(
        Dropping([1, 2, 0, 0]), monitor, logger=logger, max_steps=4, strategy=MoEStrategy(log_grad_norm=False)
    )
    with pytest.warns(UserWarning, match="comm 'limited' .8 experts. had no capacity for all tokens: 3 of 32 routes"):
        trainer.fit(small_moe(), random_tokens())
    logged = events(tmp_path)
    names = DropCounters.rates(counters_of(0))
    first, second = ({name: logged.Scalars(f"drops/{name}")[window].value for name in names} for window in (0, 1))
    # In two batches of 8 routes of 4 tokens: route 0, then the routes 0 and 1, which are all of the first token.
    assert first["dropped"] == pytest.approx(3 / 16)
    assert first["dropped_tokens"] == pytest.approx(2 / 8)
    assert first["dropped_tokens_all"] == pytest.approx(1 / 8)
    assert first["dropped_weight"] == pytest.approx(3 * 0.25 / 8)
    assert first["dropped_expert_worst"] == pytest.approx(2 / (3 / 8))
    assert first["dropped_rank_worst"] == pytest.approx(2)  # the first of two processes has those experts
    assert first["moved"] == 0
    assert not any(second.values())
    assert monitor.drops.counts["'limited' (8 experts)"]["routes"] == 16
    assert trainer.callback_metrics["drops/dropped"] == 0


def counters_of(routes):
    limited = Limited()
    limited.drop(routes)
    return limited.drops.read()


def test_the_sentence_about_drops_has_the_numbers():
    text = describe_drops(counters_of(3))
    assert text.startswith("3 of 8 routes were dropped (37.50%); of the tokens in a layer 50.00% lost a route and 25.0")
    assert "a router weight of 0.1875 per token" in text
