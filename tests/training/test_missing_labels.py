"""Batches, processes and whole validations without a label that counts: what has no mean is not logged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, IterableDataset

from olmoe_lightning import MoEStrategy
from tests.training.strategy_lab import Items, language_model, quiet, rank_and_size, sentences


class Kept(Logger):
    """Keeps what is logged, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps.append({name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def of(self, name: str) -> list[float]:
        return [step[name] for step in self.steps if name in step]


def without_labels(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


def half(batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {name: value[rank::2] for name, value in batch.items()}


def steps() -> list[dict[str, torch.Tensor]]:
    """Four rows a batch, of which each of two ranks gets half: the second of them has no label in batch 1, and nobody
    in batch 2."""
    doubles = [{name: torch.cat([value, value.flip(0)]) for name, value in batch.items()} for batch in sentences(4)]
    doubles[1]["labels"][1::2] = -100
    doubles[2] = without_labels(doubles[2])
    return doubles


def trained(strategy: str) -> tuple[list[dict[str, float]], bool]:
    rank, size = rank_and_size()
    ep = {"expert_parallel_size": 2} if strategy == "experts" else {}
    pp = {"pipeline_parallel_size": 2, "num_microbatches": 2} if strategy == "pipeline" else {}
    alone = strategy == "alone"
    logger = Kept()
    trainer = quiet("auto" if alone else MoEStrategy(**ep, **pp), devices=1 if alone else size, logger=logger)
    batches = steps() if alone or pp else [half(batch, rank) for batch in steps()]
    # The balance loss is one of a process's tokens, which differ here.
    module = language_model(overrides={"balance_loss_coeff": 0.0, "selection_bias": False, "bias_update_rate": 0.0})
    trainer.fit(module, DataLoader(Items(batches), batch_size=None))
    whole = all(parameter.isfinite().all() for parameter in module.parameters())
    logged = [{name: step[name] for name in step if name.startswith("train/")} for step in logger.steps]
    return [step for step in logged if step], whole  # other things are logged of each step


@pytest.mark.parametrize("strategy", ["data", "experts", "pipeline"])
def test_steps_without_a_label_log_nothing_and_the_others_the_mean_of_all_ranks(workers, strategy):
    alone, _ = trained("alone")
    assert [sorted(step) for step in alone] == [sorted(alone[0])] * 3
    assert len(alone[0]) >= 4
    for logged, whole in workers(2).run(trained, strategy):
        assert whole
        assert len(logged) == 3
        for ours, expected in zip(logged, alone, strict=True):
            assert ours == pytest.approx(expected, rel=1e-4)


class Passes(IterableDataset):
    """Other batches each time it is gone through; of each rank its own."""

    def __init__(self, passes: list[list[Any]]) -> None:
        self.passes, self.number = passes, 0

    def __iter__(self) -> Any:
        self.number += 1
        rank, size = rank_and_size()
        return iter(self.passes[self.number - 1][rank::size])


def validated(folder: Path) -> tuple[list[float], list[float], int, list[str], float]:
    """Validations: with labels, on rank 0 alone, without any, and with labels again."""
    some = sentences(4)
    none = [without_labels(batch) for batch in some]
    passes = [some, [some[0], none[0], some[2], none[1]], none, some]
    stopping = EarlyStopping("val/loss", patience=10, check_finite=True)
    best = ModelCheckpoint(folder, monitor="val/loss", save_top_k=2, filename="{step}")
    logger = Kept()
    trainer = quiet(
        max_epochs=4, logger=logger, callbacks=[stopping, best], enable_checkpointing=True, log_every_n_steps=100
    )
    module = language_model()
    loader = DataLoader(Passes(passes), batch_size=None)
    trainer.fit(module, DataLoader(Items(sentences(2)), batch_size=None), loader)
    assert best.best_model_score is not None
    values = [value for step in logger.steps for name, value in step.items() if name.startswith("val/")]
    files = sorted(path.name for path in folder.iterdir())
    return logger.of("val/loss"), values, trainer.current_epoch, files, float(best.best_model_score)


def test_a_validation_without_a_label_logs_nothing_and_those_who_watch_it_go_on(workers, tmp_path):
    ranks = workers(2).run(validated, tmp_path)
    for losses, values, epochs, files, best in ranks:
        assert len(losses) == 3
        assert all(math.isfinite(value) for value in values)
        assert epochs == 4
        assert len(files) == 2
        assert best == pytest.approx(min(losses))
    assert ranks[0] == ranks[1]
