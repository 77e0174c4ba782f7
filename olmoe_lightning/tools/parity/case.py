"""What is compared: a topology, the options of the step, and a small model with data that are awkward on purpose.

The microbatches have one order, whatever the topology: microbatch m is computed by data rank m mod D. One process that
accumulates all of them processes exactly the same ones in each optimizer step, so that losses that are defined per
microbatch (the balance loss) are the same function on both sides. A batch of a pipeline is M of them.

D data ranks, A accumulated batches, M microbatches of a pipeline's batch (1 without), B rows, S tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from olmoe_lightning.config import ModelConfig, Recompute
from olmoe_lightning.errors import UserError
from olmoe_lightning.model.losses import IGNORE_INDEX
from olmoe_lightning.parallel import MeshShape
from olmoe_lightning.plugins.comm.base import CommPlugin

Routing = Literal["normal", "empty_experts", "hot_expert", "idle_rank"]

SEQ_LEN = 16
VOCAB_SIZE = 64
_FAR = 10.0  # a selection bias that no score, in [0, 1], can make up for


@dataclass(frozen=True)
class ParityCase:
    """One comparison.

    Args:
        devices: processes.
        expert_parallel: processes among which the experts of a layer are shared.
        pipeline_parallel: processes among which the layers are shared.
        schedule: of the pipeline.
        num_microbatches: of a batch of the pipeline; 1 without.
        split: layers of each stage; ``None`` for the split by cost.
        accumulate: batches per process and optimizer step.
        clip: norm to which the global gradient is clipped; ``None`` for no clipping.
        precision: ``fp32``, or ``bf16`` for bfloat16 weights with fp32 masters.
        comm: name of the comm plugin of the topology, or a prototype of it; one process needs none.
        shard_optimizer: each process updates its part; ``False`` is plain data parallelism.
        steps: optimizer steps.
        uneven: microbatches of 1 to 3 rows, labels that do not count, and in the second step a data rank that has no
            label that counts.
        routing: ``normal``; ``empty_experts`` that get no token; a ``hot_expert`` that gets every token; an
            ``idle_rank`` (the last one), none of whose experts gets a token.
        optimizer: ``adamw``, or ``sgd`` with momentum.
        tie_embeddings: the head uses the embedding's weight.
        partial_window: epochs are one microbatch per process longer than a window of accumulation, so that every
            second step accumulates a single one.
        overlap: communicate while the backward and the next forward pass run.
        recompute: what the backward pass computes again: ``none``, each ``block``, or the ``experts``.
        accelerator: what the processes compute on, ``cpu`` or ``gpu``.

    Raises:
        UserError: a number is out of range, or numbers do not fit each other.
    """

    devices: int = 2
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    schedule: str = "1f1b"
    num_microbatches: int = 1
    split: list[int] | None = None
    accumulate: int = 1
    clip: float | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    comm: str | CommPlugin = "auto"
    shard_optimizer: bool = True
    steps: int = 3
    uneven: bool = True
    routing: Routing = "normal"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    tie_embeddings: bool = False
    partial_window: bool = False
    overlap: bool = True
    recompute: Recompute = "none"
    accelerator: Literal["cpu", "gpu"] = "cpu"

    def __post_init__(self) -> None:
        for name in ("devices", "expert_parallel", "pipeline_parallel", "num_microbatches", "accumulate", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} ({getattr(self, name)}) must be at least 1")
        model_parallel = self.expert_parallel * self.pipeline_parallel
        if self.devices % model_parallel:
            raise UserError(
                f"devices ({self.devices}) must be divisible by expert_parallel ({self.expert_parallel}) x "
                f"pipeline_parallel ({self.pipeline_parallel}): so many processes together hold the model once"
            )
        if self.pipeline_parallel == 1 and self.num_microbatches > 1:
            raise UserError(f"num_microbatches ({self.num_microbatches}) needs a pipeline_parallel (1) of at least 2")
        if self.clip is not None and self.clip <= 0:
            raise UserError(f"clip ({self.clip}) must be positive; leave it out for no clipping")
        if self.routing == "idle_rank" and self.expert_parallel == 1:
            raise UserError(
                "routing 'idle_rank' needs an expert_parallel (1) of at least 2: one process has all experts"
            )
        if self.routing != "normal" and self.precision == "bf16":
            raise UserError(
                f"routing {self.routing!r} is compared in fp32 only: in bf16 the choice of experts is forced"
            )
        if self.partial_window and self.accumulate == 1:
            raise UserError("partial_window needs accumulate (1) to be at least 2")

    @property
    def mesh(self) -> MeshShape:
        """Sizes of the topology."""
        return MeshShape.of_world(self.devices, self.pipeline_parallel, self.expert_parallel)

    @property
    def parts(self) -> int:
        """Microbatches that all processes compute together for one batch of the Trainer, D · M."""
        return self.mesh.data * self.num_microbatches

    @property
    def bound(self) -> float:
        """Largest relative deviation from one process that is accepted, see ``docs/parity.md``."""
        if self.precision == "bf16":
            return 5e-2
        return 1e-6 if self.devices == 1 else 2e-5

    @property
    def num_experts(self) -> int:
        """8, or what gives each rank at least two experts."""
        return self.expert_parallel * max(2, -(-8 // self.expert_parallel))

    @property
    def model_config(self) -> ModelConfig:
        """Everything that can go wrong across processes is switched on."""
        return ModelConfig(
            vocab_size=VOCAB_SIZE,
            d_model=32,
            num_layers=2 if self.pipeline_parallel == 1 else 8,
            num_dense_layers=0 if self.pipeline_parallel == 1 else 1,
            dense_hidden=0 if self.pipeline_parallel == 1 else 48,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            num_experts=self.num_experts,
            top_k=2,
            expert_hidden=16,
            shared_hidden=16,
            max_seq_len=SEQ_LEN,
            tie_embeddings=self.tie_embeddings,
            selection_bias=True,
            bias_update_rate=0.01,
            balance_loss_coeff=0.02,
            router_z_loss_coeff=0.003,
            # In bfloat16 weights soon differ in their last bit. A token near a tie would then choose another expert,
            # and no bound could tell that from a mistake. The router still weighs and learns.
            router_mode="uniform" if self.precision == "bf16" else "learned",
            lm_z_loss_coeff=0.001,
            recompute=self.recompute,
            init_std=0.1,  # experts that are far apart: rounding does not change the choice
        )

    @property
    def initial_bias(self) -> Tensor:
        """Selection bias that brings the routing about, fp32 [E]."""
        bias = torch.zeros(self.num_experts)
        if self.routing == "empty_experts":
            bias[[1, -2]] = -_FAR
        elif self.routing == "hot_expert":
            bias[-1] = _FAR
        elif self.routing == "idle_rank":
            bias[-self.num_experts // self.expert_parallel :] = -_FAR
        return bias

    # ---------------------------------------------------------------------------------------------- data

    @cached_property
    def microbatches(self) -> list[dict[str, Tensor]]:
        """Those of an epoch in their order: ``input_ids`` and ``labels``, int64 [B, S]."""
        per_rank = self.accumulate + 1 if self.partial_window else self.accumulate * self.steps
        return [self._microbatch(index) for index in range(per_rank * self.parts)]

    def _microbatch(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        # Those of one batch of a pipeline have equally many rows.
        number = index if self.num_microbatches == 1 else index // self.parts
        rows = 1 + number % 3 if self.uneven else 2
        tokens = torch.randint(0, VOCAB_SIZE, (rows, SEQ_LEN + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if self.uneven:
            for row in range(rows):
                labels[row, : (5 * index + 3 * row) % SEQ_LEN] = IGNORE_INDEX
            if index == self.accumulate * self.parts + self.parts - 1 and self._has_others_in_second_step:
                labels[:] = IGNORE_INDEX
        return {"input_ids": tokens[:, :-1].clone(), "labels": labels}

    @property
    def _has_others_in_second_step(self) -> bool:
        return self.parts > 1 or (self.accumulate > 1 and not self.partial_window)

    def of_rank(self, data_rank: int) -> list[dict[str, Tensor]]:
        """The batches of one rank: its microbatches, M at a time."""
        own = self.microbatches[data_rank :: self.mesh.data]
        groups = [own[start : start + self.num_microbatches] for start in range(0, len(own), self.num_microbatches)]
        return [{name: torch.cat([each[name] for each in group]) for name in group[0]} for group in groups]

    def counted(self, position: int, together: int) -> int:
        """Tokens that count in the ``together`` microbatches at this position of the epoch."""
        part = self.microbatches[position * together : (position + 1) * together]
        return sum(int((microbatch["labels"] != IGNORE_INDEX).sum()) for microbatch in part)
