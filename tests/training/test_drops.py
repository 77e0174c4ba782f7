"""What was dropped is added up over all processes, also over those that have nothing to count."""

import warnings

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from olmoe_lightning import ModelConfig, MoEStrategy, OLMoE
from olmoe_lightning.callbacks import ExpertLoadMonitor
from olmoe_lightning.plugins import RowwiseComm

# The first stage has dense layers only, and so no communication plugin.
CONFIG = ModelConfig.preset(
    "tiny", vocab_size=64, d_model=16, num_layers=4, num_dense_layers=2, dense_hidden=16, num_heads=2, num_kv_heads=1,
    head_dim=8, num_experts=4, top_k=2, expert_hidden=8, max_seq_len=16,
)  # fmt: skip


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}


def train_in_a_pipeline():
    monitor = ExpertLoadMonitor(every_n_steps=2, heatmaps=False)
    strategy = MoEStrategy(
        pipeline_parallel_size=2, pipeline_split=[2, 2], num_microbatches=2, comm=RowwiseComm(capacity_factor=0.5)
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, callbacks=[monitor], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(OLMoE(CONFIG), DataLoader(Rows(), batch_size=None))
    told = [str(each.message) for each in caught if "no capacity for all tokens" in str(each.message)]
    return monitor.latest["drops/dropped"], monitor.drops.counts, told


def test_a_stage_without_experts_takes_part(workers):
    first, second = workers(2).run(train_in_a_pipeline)
    for rate, counts, _ in (first, second):
        ((_, found),) = counts.items()
        # The last window is one step: 4 x 16 tokens in 2 layers, with 2 routes each, of which half have room.
        assert found["routes"] == 256
        assert sum(found["dropped_by_expert"]) == 128
        assert rate == 0.5
    assert len(first[2]) == 1
    assert "384 of 768 routes were dropped (50.00%)" in first[2][0]
    assert second[2] == []
