"""A small LightningModule and data module that offer what the callbacks use, and nothing else of OLMoE."""

import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from olmoe_lightning.config import ModelConfig

CONFIG = ModelConfig.preset(
    "tiny", vocab_size=32, d_model=16, num_layers=3, num_dense_layers=1, dense_hidden=32, num_experts=8, top_k=2
)


@dataclass
class Stats:
    counts: Tensor
    prob_sum: Tensor
    entropy_sum: Tensor
    z_sum: Tensor
    balance_sum: Tensor
    num_tokens: Tensor


class SmallMoE(LightningModule):
    """Routers over embeddings: their statistics are real, their experts are left out.

    ``history`` keeps (stage, stats) of every batch; the ``*_seconds`` arguments make parts of a run slow.
    """

    def __init__(self, train_seconds: float = 0.0, val_seconds: float = 0.0, slow_steps: int = 0) -> None:
        super().__init__()
        self.config = CONFIG
        self.embed = nn.Embedding(CONFIG.vocab_size, CONFIG.d_model)
        self.routers = nn.ModuleList(
            nn.Linear(CONFIG.d_model, CONFIG.num_experts) for _ in range(CONFIG.num_moe_layers)
        )
        self.head = nn.Linear(CONFIG.d_model, CONFIG.vocab_size)
        self.routing_stats: Stats | None = None
        self.history: list[tuple[str, Stats]] = []
        self.train_seconds, self.val_seconds, self.slow_steps = train_seconds, val_seconds, slow_steps

    def _step(self, batch: dict[str, Tensor], stage: str) -> dict[str, Tensor]:
        x = self.embed(batch["input_ids"])
        counts_as = batch["labels"] != -100
        layers = []
        for router in self.routers:
            probabilities = router(x)[counts_as].softmax(-1)  # [T, E]
            chosen = probabilities.topk(CONFIG.top_k).indices
            counts = torch.bincount(chosen.flatten(), minlength=CONFIG.num_experts)
            entropy = torch.special.entr(probabilities).sum()
            balance = CONFIG.num_experts / CONFIG.top_k * (counts / len(chosen) * probabilities.sum(0)).sum()
            layers.append((counts, probabilities.sum(0), entropy, balance))
        counts, prob_sum, entropy_sum, balance_sum = (
            torch.stack(parts).detach() for parts in zip(*layers, strict=True)
        )
        self.routing_stats = Stats(
            counts, prob_sum, entropy_sum, torch.zeros_like(entropy_sum), balance_sum, counts_as.sum()
        )
        self.history.append((stage, self.routing_stats))
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss = loss + 0.01 * sum(balance for *_, balance in layers) / counts_as.sum()  # the routers learn too
        return {"loss": loss, "num_tokens": counts_as.sum()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        time.sleep(0.4 if self.global_step < self.slow_steps else self.train_seconds)
        return self._step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        time.sleep(self.val_seconds)
        stage = "sanity" if self.trainer.sanity_checking else "val"
        loss = self._step(batch, stage)["loss"]
        self.log("val/loss", loss, batch_size=1)
        self.log("val/nats_per_byte", loss / 2, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def generate(
        self,
        prompt_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        eos_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        ids = prompt_ids
        for _ in range(max_new_tokens):
            probabilities = (self.head(self.embed(ids[:, -1])) / temperature).softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], 1)
        return ids


class Letters:
    """A tokenizer of 31 letters and an end."""

    vocab_size, eos_id, pad_id = 32, 31, 30
    letters = "abcdefghijklmnopqrstuvwxyz .,;:"
    token_bytes = np.array([1] * 31 + [0], dtype=np.int32)

    def encode(self, text: str) -> list[int]:
        return [self.letters.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.letters[i] for i in ids)


class RandomTokens(LightningDataModule):
    """Batches [B=2, S=16] that differ; two labels of each row are ignored."""

    seq_len = 16

    def __init__(self, batches: int = 64, val_batches: int = 2) -> None:
        super().__init__()
        self.tokenizer = Letters()
        self.batches, self.val_batches = batches, val_batches

    def fingerprint(self) -> dict[str, object]:
        return {"seed": 1, "sources": [{"path": "letters", "tokens": 1024}]}

    def _rows(self, batches: int, seed: int) -> list[dict[str, Tensor]]:
        ids = torch.randint(0, 31, (2 * batches, 17), generator=torch.Generator().manual_seed(seed))
        labels = ids[:, 1:].clone()
        labels[:, -2:] = -100
        return [{"input_ids": i, "labels": t} for i, t in zip(ids[:, :-1], labels, strict=True)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self._rows(self.batches, 1), batch_size=2)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._rows(self.val_batches, 2), batch_size=2)


@pytest.fixture
def make_trainer(tmp_path):
    """A real CPU trainer, quiet, with no checkpoint and no validation unless asked for."""

    def make(*callbacks, **options) -> Trainer:
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 6,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 2,
            "limit_val_batches": 0,
            "default_root_dir": tmp_path,
        }
        return Trainer(callbacks=list(callbacks), **(defaults | options))

    return make


@pytest.fixture
def small_moe():
    return SmallMoE


@pytest.fixture
def random_tokens():
    return RandomTokens
