"""Sizes that cannot work together are refused before a process is started, wherever they are known."""

import re

import pytest
import torch
from strategy_lab import quiet
from test_pipeline import Chain, batches, every_batch, model
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from olmoe_lightning import MoEStrategy, TokenDataModule, TokenSource
from olmoe_lightning.errors import UserError
from olmoe_lightning.training.processes import Launcher


def loader(samples, **options):
    return DataLoader(TensorDataset(torch.zeros(samples, 8), torch.zeros(samples, 8)), **options)


def data_module():
    return TokenDataModule(train=[TokenSource("nowhere.npy")], batch_size=6)


def own_batches():
    return loader(12, batch_sampler=BatchSampler(SequentialSampler(range(12)), 6, drop_last=True))


REFUSED = {
    "batch_size": (lambda: loader(24, batch_size=6), {}, r"batch_size \(6\).*num_microbatches \(4\).*4 or 8"),
    "a small batch": (lambda: loader(24, batch_size=2), {}, r"batch_size \(2\).*num_microbatches \(4\).*take 4,"),
    "a data module": (data_module, {}, r"batch_size of TokenDataModule \(6\).*num_microbatches \(4\)"),
    "a sampler of batches": (own_batches, {}, r"batch_size \(6\).*num_microbatches \(4\)"),
    "the last batch": (lambda: loader(21, batch_size=8), {}, r"last batch of 21 samples in batches of 8 \(5\)"),
    "the share of a process": (
        lambda: loader(26, batch_size=8),
        {"devices": 4, "use_distributed_sampler": True},
        r"last batch of 13 samples in batches of 8 \(5\)",
    ),
}
ACCEPTED = {
    "rows that come out even": (lambda: loader(20, batch_size=8), {}),
    "drop_last": (lambda: loader(21, batch_size=8, drop_last=True), {}),
    "a last batch that is not reached": (lambda: loader(21, batch_size=8), {"limit_train_batches": 2}),
    "steps that end before": (lambda: loader(21, batch_size=8), {"max_steps": 1, "accumulate_grad_batches": 2}),
    "batches that are made elsewhere": (lambda: loader(3, batch_size=None), {}),
}


class Started(Exception):
    """The launcher was about to start processes."""


def start(monkeypatch, data, options):
    def started(self):
        raise Started

    monkeypatch.setattr(Launcher, "_call_children_scripts", started)
    strategy = MoEStrategy(pipeline_parallel_size=2, num_microbatches=4)
    trainer = quiet(strategy, **({"devices": 2} | options))
    trainer.fit(Chain(), data)


@pytest.mark.parametrize("kind", REFUSED)
def test_batches_that_cannot_be_cut_are_refused_before_a_process_is_started(monkeypatch, kind):
    data, options, words = REFUSED[kind]
    with pytest.raises(UserError) as error:
        start(monkeypatch, data(), options)
    assert re.search(words, str(error.value)), error.value


@pytest.mark.parametrize("kind", ACCEPTED)
def test_batches_that_can_be_cut_or_do_not_come_are_not_refused(monkeypatch, kind):
    data, options = ACCEPTED[kind]
    with pytest.raises(Started):
        start(monkeypatch, data(), options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 2, "pipeline_split": [4, 2]}, r"split \[4, 2\].*sum 5"),
        ({"pipeline_parallel_size": 2, "num_microbatches": 1}, r"num_microbatches \(1\)"),
        ({"pipeline_parallel_size": 8, "num_microbatches": 8}, r"num_layers \(5\).*= 8"),
        ({"expert_parallel_size": 3}, r"num_experts \(4\).*expert_parallel_size \(3\)"),
    ],
)
def test_layers_and_experts_that_do_not_fit_are_refused_before_a_process_is_started(monkeypatch, options, words):
    monkeypatch.setattr(Launcher, "_call_children_scripts", lambda self: pytest.fail("processes were started"))
    devices = options.get("pipeline_parallel_size", 1) * options.get("expert_parallel_size", 1)
    with pytest.raises(UserError, match=words):
        quiet(MoEStrategy(**options), devices=devices).fit(model(), every_batch(batches(1)))


class LateData(Chain):
    """Its data is known when it is set up, and not before."""

    def train_dataloader(self):
        return loader(21, batch_size=8)


def refusal():
    strategy = MoEStrategy(pipeline_parallel_size=2, num_microbatches=4)
    try:
        quiet(strategy, devices=2).fit(LateData())
    except UserError as error:
        return str(error)
    return "nothing"


def test_a_loader_that_is_made_later_is_refused_on_all_ranks_before_its_first_batch(workers):
    for message in workers(2).run(refusal):
        assert re.search(r"last batch of 21 samples in batches of 8 \(5\)", message), message
