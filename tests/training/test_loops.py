"""fit, validate, test and predict on two processes, alone and after one another, and what they log."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from strategy_lab import (
    CLOSE,
    SMALL_BUCKETS,
    Dense,
    Items,
    language_model,
    own_batches,
    quiet,
    rank_and_size,
    sentences,
    state_of,
    vectors,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from olmoe_lightning import MoEStrategy


class Evaluated(Dense):
    """Logs in all loops."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks.append(nn.Dropout(0.0))
        self.modes = []

    def training_step(self, batch, batch_idx):
        self.modes.append(all(module.training for module in self.modules()))
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.modes.append(any(module.training for module in self.modules()))
        self.log("val", self.loss(batch), prog_bar=True, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch), sync_dist=True)
        self.log("most", batch.max(), sync_dist=True, reduce_fx="max")
        self.log("rows", float(len(batch)), sync_dist=True, reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return self(batch)


def evaluate_everything():
    module = Evaluated()
    trainer = quiet(max_epochs=2)
    seen = {}
    validated = trainer.validate(module, own_batches(vectors(4)), verbose=False)
    trainer.fit(module, own_batches(vectors(8)), own_batches(vectors(4)))
    metrics, bar = dict(trainer.callback_metrics), trainer.progress_bar_metrics
    state = state_of(trainer)
    seen["test"] = trainer.test(module, own_batches(vectors(6)), verbose=False)
    predicted = trainer.predict(module, own_batches(vectors(4)))
    seen["again"] = trainer.validate(module, own_batches(vectors(4)), verbose=False)
    return validated, metrics, bar, seen, predicted, state, module.modes


def test_all_loops_in_one_trainer_equal_on_all_ranks_and_to_one_process(workers):
    first, second = workers(2).run(evaluate_everything)
    module = Evaluated()
    alone = quiet("auto", devices=1, max_epochs=2, accumulate_grad_batches=2)
    validated, metrics, bar, seen, _, state, _ = first
    assert validated[0]["val"] == pytest.approx(
        alone.validate(module, own_batches(vectors(4)), verbose=False)[0]["val"]
    )
    alone.fit(module, own_batches(vectors(8)), own_batches(vectors(4)))
    torch.testing.assert_close(state, dict(module.state_dict()), **CLOSE)
    assert metrics["val"] == pytest.approx(float(alone.callback_metrics["val"]), rel=1e-5)
    (tested,) = alone.test(module, own_batches(vectors(6)), verbose=False)
    assert seen["test"][0] == pytest.approx(tested, rel=1e-5)
    assert seen["again"][0]["val"] == pytest.approx(float(metrics["val"]))
    expected = alone.predict(module, own_batches(vectors(4)))
    for rank, (_, _, _, _, predicted, _, _) in enumerate((first, second)):
        for ours, theirs in zip(predicted, expected[rank::2], strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)

    assert (metrics, bar) == (second[1], second[2])
    assert {"train", "val", "grad_norm", "skipped_steps"} <= metrics.keys()
    assert seen == second[3]


def test_training_goes_on_in_training_mode_after_a_validation(workers):
    for *_, modes in workers(2).run(evaluate_everything):
        assert modes == [False] * 2 + ([True] * 4 + [False] * 2) * 2 + [False] * 2


ENTRIES = [("validate", 1), ("test", 1), ("predict", 1), ("validate", 2), ("test", 2), ("predict", 2)]


def enter(name, expert_parallel_size):
    trainer = quiet(MoEStrategy(expert_parallel_size=expert_parallel_size))
    module = Evaluated() if expert_parallel_size == 1 else language_model()
    data = own_batches(vectors(4) if expert_parallel_size == 1 else sentences(4))
    result = getattr(trainer, name)(module, data)
    return len(result)


@pytest.mark.parametrize(("name", "expert_parallel_size"), ENTRIES)
def test_each_loop_runs_without_a_fit_before(workers, name, expert_parallel_size):
    assert workers(2).run(enter, name, expert_parallel_size) == [1 if name != "predict" else 2] * 2


def fit_twice(one_trainer, expert_parallel_size):
    def strategy():
        return MoEStrategy(expert_parallel_size=expert_parallel_size, bucket_megabytes=SMALL_BUCKETS)

    module = language_model()
    trainer = quiet(strategy(), max_epochs=1)
    trainer.fit(module, own_batches(sentences(4)))
    if one_trainer:
        trainer.fit_loop.max_epochs = 2
    else:
        trainer = quiet(strategy(), max_epochs=1)
    trainer.fit(module, own_batches(sentences(4)))
    return state_of(trainer)


@pytest.mark.parametrize("one_trainer", [True, False], ids=["one trainer", "two trainers"])
@pytest.mark.parametrize("expert_parallel_size", [1, 2])
def test_fit_twice_in_one_process_equals_one_process(workers, one_trainer, expert_parallel_size):
    ours, _ = workers(2).run(fit_twice, one_trainer, expert_parallel_size)

    module = language_model()
    for _ in range(2):
        trainer = quiet(MoEStrategy(), devices=1, accumulate_grad_batches=2)
        trainer.fit(module, own_batches(sentences(4)))
    torch.testing.assert_close(ours, state_of(trainer), **CLOSE | {"atol": 1e-5})  # AdamW on gradients near zero


def predict_unevenly(expert_parallel_size):
    rank, _ = rank_and_size()
    trainer = quiet(MoEStrategy(expert_parallel_size=expert_parallel_size))
    try:
        return len(trainer.predict(Evaluated(), DataLoader(Items(vectors(2 + rank)), batch_size=None)))
    except ValueError as error:
        return str(error)


def test_uneven_batches_are_refused_only_where_ranks_exchange_tokens(workers):
    assert workers(2).run(predict_unevenly, 1) == [2, 3]
    for rank, message in enumerate(workers(2).run(predict_unevenly, 2)):
        assert f"from 2 to 3 (rank {rank} of 2" in message
        assert f"has {2 + rank})" in message


class Talks(Callback):
    """Uses everything in which a strategy lets processes talk."""

    def on_train_start(self, trainer, pl_module):
        rank, strategy = trainer.global_rank, trainer.strategy
        mine = torch.tensor([1.0 + rank, 4.0])
        self.heard = {
            "mean": strategy.reduce(mine),
            "sum": strategy.reduce(mine, reduce_op="sum"),
            "max": strategy.reduce(mine, reduce_op="max"),
            "integers": strategy.reduce(torch.tensor([2**40 + rank]), reduce_op="sum"),
            "mean of integers": strategy.reduce(torch.tensor([1 + rank])),
            "untouched": mine.clone(),
            "no tensor": strategy.reduce("text"),
            "gathered": pl_module.all_gather(mine),
            "gathered dict": pl_module.all_gather({"a": mine})["a"],
            "all": strategy.reduce_boolean_decision(rank == 0),
            "any": strategy.reduce_boolean_decision(rank == 0, all=False),
            "broadcast": strategy.broadcast({"rank": rank}, src=1),
            "sampler": trainer.distributed_sampler_kwargs,
            "where": str(strategy.mesh),
        }
        strategy.barrier("test")


def talk():
    talks = Talks()
    quiet(callbacks=[talks]).fit(Dense(), own_batches(vectors(2)))
    return talks.heard


def test_ranks_hear_each_other(workers):
    for rank, heard in enumerate(workers(2).run(talk)):
        assert heard["mean"].tolist() == [1.5, 4.0]
        assert heard["sum"].tolist() == [3.0, 8.0]
        assert heard["max"].tolist() == [2.0, 4.0]
        assert heard["integers"].tolist() == [2**41 + 1]
        assert heard["integers"].dtype == torch.int64
        assert heard["mean of integers"].tolist() == [1.5]
        assert heard["untouched"].tolist() == [1.0 + rank, 4.0]
        assert heard["no tensor"] == "text"
        assert heard["gathered"].tolist() == heard["gathered dict"].tolist() == [[1.0, 4.0], [2.0, 4.0]]
        assert (heard["all"], heard["any"]) == (False, True)
        assert heard["broadcast"] == {"rank": 1}
        assert heard["sampler"] == {"num_replicas": 2, "rank": rank}
        assert heard["where"] == f"rank {rank} of 2 (pipeline 0/1, expert_replica {rank}/2, expert 0/1)"


def samplers(expert_parallel_size):
    class Module(LightningModule):
        def training_step(self, batch, batch_idx):
            return self.weight.sum() * batch.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Module()
    module.weight = nn.Parameter(torch.ones(1))
    trainer = quiet(MoEStrategy(expert_parallel_size=expert_parallel_size), use_distributed_sampler=True)
    trainer.fit(module, DataLoader(Items(list(torch.arange(6.0)))))
    sampler = trainer.train_dataloader.sampler
    return type(sampler) is DistributedSampler, sampler.num_replicas, sampler.rank, sampler.shuffle


@pytest.mark.parametrize("expert_parallel_size", [1, 2])
def test_lightning_gives_each_data_rank_its_own_samples(workers, expert_parallel_size):
    assert workers(2).run(samplers, expert_parallel_size) == [(True, 2, 0, True), (True, 2, 1, True)]


def stop_early():
    module = Evaluated()
    stop = EarlyStopping("val", patience=0, min_delta=100.0)
    trainer = quiet(callbacks=[stop], max_epochs=5)
    trainer.fit(module, own_batches(vectors(4)), own_batches(vectors(4)))
    return trainer.current_epoch


def test_early_stopping_ends_all_ranks_together(workers):
    assert workers(2).run(stop_early) == [2, 2]


def test_a_module_writes_text_after_fit_on_one_process():
    module = language_model()
    trainer = quiet(MoEStrategy(), devices=1)
    trainer.fit(module, own_batches(sentences(2)))
    written = module.generate(torch.zeros(1, 2, dtype=torch.int64), 3, temperature=0.0)
    fresh = language_model()
    fresh.built().load_state_dict(module.model.state_dict())
    assert torch.equal(written, fresh.generate(torch.zeros(1, 2, dtype=torch.int64), 3, temperature=0.0))


def skip_batches(strategy, lr):
    module = Dense(
        lambda module: torch.optim.SGD(module.parameters(), lr=lr),
        step=lambda module, x, number: None if number in (1, 2) else module.loss(x),
    )
    trainer = quiet(strategy, devices=1, accumulate_grad_batches=2)
    trainer.fit(module, own_batches(list(enumerate(vectors(4)))))
    return state_of(trainer)


def test_a_step_without_loss_loses_no_accumulated_gradient():
    """One process only: Lightning forbids it on several. It divides by 2 though a window has one loss; we do not."""
    torch.testing.assert_close(skip_batches(MoEStrategy(), lr=0.05), skip_batches("auto", lr=0.1), **CLOSE)
