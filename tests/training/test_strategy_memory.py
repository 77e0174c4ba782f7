"""Bytes that stay between steps: what the strategy says, what its formula says, and what is really there."""

import gc

import pytest
import torch
from lightning.pytorch import Callback
from strategy_lab import Items, quiet
from tiny_model import SMALL
from torch import Tensor
from torch.utils.data import DataLoader

from olmoe_lightning import MoEStrategy, OLMoE
from olmoe_lightning.plugins import BF16Precision

CONFIG = SMALL.replace(vocab_size=512, d_model=128, num_kv_heads=2, head_dim=64, num_experts=8, expert_hidden=256)
"""1.9 million parameters, 1.6 million of them in experts."""


def storages(tensors):
    """Bytes by address of each storage, however many tensors look at it."""
    found = {}
    for tensor in tensors:
        for part in (tensor, tensor.grad if tensor.is_leaf else None):
            if part is not None and part.device.type == "cpu":
                found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return found


def alive():
    """Storages of all tensors that Python knows."""
    gc.collect()
    return storages([item for item in gc.get_objects() if isinstance(item, Tensor)])


class Measures(Callback):
    """Counts when training is over and the fit is not: it leaves the module with its masters."""

    def __init__(self, before):
        self.before = before
        self.found = None

    def on_train_end(self, trainer, pl_module):
        sharded = trainer.strategy.sharded
        reached = [*pl_module.parameters(), *pl_module.buffers()]
        for bucket in sharded.buckets:
            reached += [bucket.weights, bucket.grads, bucket.masters]
        for master, state in trainer.optimizers[0].state.items():
            reached += [master, *(value for value in state.values() if isinstance(value, Tensor))]
        there = storages(reached) | {key: size for key, size in alive().items() if key not in self.before}
        self.found = sum(there.values()), sum(sharded.persistent_bytes().values()), sharded.predicted_bytes()


def measure(expert_parallel_size, precision, shard_optimizer):
    measures = Measures(alive())
    strategy = MoEStrategy(
        expert_parallel_size=expert_parallel_size, shard_optimizer=shard_optimizer, bucket_megabytes=1.0
    )
    plugins = [BF16Precision()] if precision == "bf16" else []
    trainer = quiet(strategy, plugins=plugins, max_steps=1, callbacks=[measures])
    tokens = torch.randint(0, 512, (1, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    module = OLMoE(CONFIG, schedule="constant")
    trainer.fit(module, DataLoader(Items([batch]), batch_size=None))
    return measures.found


EXPERTS = CONFIG.num_layers * CONFIG.num_experts * 3 * CONFIG.d_model * CONFIG.expert_hidden
DENSE = CONFIG.num_params - EXPERTS


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("replicas", "experts"), [(2, 1), (1, 2), (2, 2)], ids=["2x1", "1x2", "2x2"])
def test_persistent_bytes_are_within_three_percent_of_the_formula(workers, replicas, experts, precision):
    fixed, shared = (6, 12) if precision == "bf16" else (8, 8)
    formula = (fixed + shared / (replicas * experts)) * DENSE + (fixed + shared / replicas) * EXPERTS / experts
    for measured, said, predicted in workers(replicas * experts).run(measure, experts, precision, True):
        assert predicted == formula
        assert said == pytest.approx(formula, rel=0.03)
        assert measured == pytest.approx(formula, rel=0.03)


def test_without_sharding_each_process_has_the_whole_optimizer(workers):
    for measured, said, predicted in workers(2).run(measure, 1, "bf16", False):
        assert predicted == (6 + 12) * (DENSE + EXPERTS)
        assert said == pytest.approx(predicted, rel=0.03)
        assert measured == pytest.approx(predicted, rel=0.03)
