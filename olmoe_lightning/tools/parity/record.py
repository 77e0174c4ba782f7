"""Train a case under Lightning and keep everything that must not depend on the topology, as plain tensors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from typing_extensions import override

from olmoe_lightning.checkpoint.full import (
    full_gradients,
    full_masters,
    full_optimizer_state,
    full_state_by_name,
    of_all_stages,
)
from olmoe_lightning.model.router import Router
from olmoe_lightning.module import OLMoE
from olmoe_lightning.parallel.sharded_optimizer import ShardedOptimizer
from olmoe_lightning.plugins.precision.bf16 import BF16Precision
from olmoe_lightning.strategy import MoEStrategy
from olmoe_lightning.tools.parity.case import ParityCase
from olmoe_lightning.tools.parity.fault_injection import Fault, FaultInjection

LEARNING_RATE = 1e-2
EPS = 1e-3
"""AdamW's. An update is about g / (|g| + eps): with the usual 1e-8, an element whose gradient is nothing but rounding
would move by a whole learning rate in an arbitrary direction, and no two orders of summation would agree. With 1e-3,
which is small beside most gradients here, deviations of the gradients grow less than tenfold on their way."""


@dataclass
class StepRecord:
    """An optimizer step."""

    losses: dict[str, float]
    """What was logged as ``train/...``, averaged over the tokens of the step."""
    grad_norm: float
    """Before clipping."""
    expert_load: Tensor
    """How often each expert was chosen, int64 [Lm, E]."""
    gradients: dict[str, Tensor]
    """Of whole parameters by name, fp32, after clipping."""
    learning_rates: dict[str, float]
    """Of the parameter groups by name, for the next step."""
    skipped_steps: int


@dataclass
class RankRecord:
    """What one process has at the end."""

    pipeline_rank: int
    """Which part of the layers."""
    expert_rank: int
    """Which part of the experts."""
    weights: dict[str, Tensor]
    """Its parameters and buffers by name, the experts' part only, in the dtype of the computation."""
    expert_names: list[str]
    """Which of them are experts."""
    metrics: list[dict[str, float]]
    """``trainer.callback_metrics`` after each microbatch."""


@dataclass
class RunRecord:
    """A run."""

    steps: list[StepRecord] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Whole parameters at the end, fp32 (the masters)."""
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """The optimizer's state: parameter's name -> tensor, by kind."""
    options: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's parameter groups as a checkpoint would keep them."""
    biases: dict[str, Tensor] = field(default_factory=dict)
    """Selection biases of the routers, fp32 [E]."""
    ranks: list[RankRecord] = field(default_factory=list)
    """All processes."""
    drops: dict[str, Tensor] = field(default_factory=dict)
    """What the comm plugin dropped in all processes and steps together; empty where nothing can be dropped."""


class LabModel(OLMoE):
    """The small model of a case, its routing and its optimizer."""

    def __init__(self, case: ParityCase) -> None:
        super().__init__(
            case.model_config,
            learning_rate=LEARNING_RATE,
            eps=EPS,
            schedule="cosine",
            warmup_steps=1,
            schedule_steps=case.steps + 2,
        )
        self.case = case

    @override
    def configure_model(self) -> None:
        super().configure_model()
        for router in self.modules():
            if isinstance(router, Router):
                assert router.selection_bias is not None
                router.selection_bias.copy_(self.case.initial_bias)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        if self.case.optimizer == "adamw":
            return super().configure_optimizers()
        optimizer = torch.optim.SGD(self.parameters(), LEARNING_RATE * 10, momentum=0.9, weight_decay=0.1)
        scheduler = LambdaLR(optimizer, self._lr_schedule())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Recorder(Callback):
    """Writes a :class:`RunRecord`; collective, so every process has one.

    It reads gradients and masters, never the weights that may still be on their way between two steps.

    Args:
        case: knows how many tokens each microbatch has.
        together: microbatches that are processed for one batch of the Trainer, by all processes.
    """

    reads_weights_between_steps = False

    def __init__(self, case: ParityCase, together: int) -> None:
        self.case = case
        self.together = together
        self.run = RunRecord()
        self._sums: dict[str, float] = defaultdict(float)
        self._tokens = 0
        self._load: Tensor = torch.zeros((), dtype=torch.int64)
        self._metrics: list[dict[str, float]] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add up what was logged; after an optimizer step, keep it and the gradients."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._metrics.append(metrics)
        tokens = self.case.counted(batch_idx, self.together)
        self._tokens += tokens
        for name, value in metrics.items():
            if name.startswith("train/") and name.endswith("loss"):  # the perplexity is no mean over tokens
                self._sums[name] += value * tokens
        assert isinstance(pl_module, LabModel)
        assert pl_module.routing_stats is not None
        strategy, _ = _strategy_of(trainer)
        self._load = self._load + strategy.sum_over_data(pl_module.routing_stats.counts).cpu()
        if trainer.global_step > len(self.run.steps):
            self._end_step(trainer)

    def _end_step(self, trainer: Trainer) -> None:
        strategy, sharded = _strategy_of(trainer)
        assert strategy.grad_norm is not None
        self.run.steps.append(
            StepRecord(
                losses={name: total / max(self._tokens, 1) for name, total in self._sums.items()},
                grad_norm=strategy.grad_norm,
                expert_load=self._load,
                gradients=full_gradients(sharded),
                learning_rates=of_all_stages(
                    strategy.mesh,
                    {
                        group.get("name", str(place)): group["lr"]
                        for place, group in enumerate(trainer.optimizers[0].param_groups)
                    },
                ),
                skipped_steps=strategy.skipped_steps,
            )
        )
        self._sums.clear()
        self._tokens = 0
        self._load = torch.zeros_like(self._load)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what there is at the end."""
        strategy, sharded = _strategy_of(trainer)
        strategy.wait_for_weights()
        run = self.run
        run.parameters = full_masters(sharded)
        for name, entries in full_state_by_name(sharded).items():
            for kind, value in entries.items():
                run.state.setdefault(kind, {})[name] = torch.as_tensor(value).cpu().float()
        options = full_optimizer_state(sharded).get("param_groups", [])
        # A pipeline's stages do not know how one process would number the parameters.
        run.options = [{key: item for key, item in group.items() if key != "params"} for group in options]
        run.options.sort(key=lambda group: str(group.get("name")))
        own = RankRecord(
            strategy.mesh.pipeline.rank,
            strategy.mesh.expert.rank,
            {name: p.detach().cpu().clone() for name, p in [*pl_module.named_parameters(), *pl_module.named_buffers()]},
            [name for name, parameter, _ in sharded.parameters if sharded.ownership.is_expert(parameter)],
            self._metrics,
        )
        run.ranks = strategy.mesh.world.all_gather_objects(own)
        run.drops = next(iter(strategy.sum_of_drops(strategy.own_drops()).values()), {})  # layers of one size
        run.biases = {
            name: value
            for rank in reversed(run.ranks)  # the first one that has it stays
            for name, value in rank.weights.items()
            if name.endswith("selection_bias")
        }


def _strategy_of(trainer: Trainer) -> tuple[MoEStrategy, ShardedOptimizer]:
    strategy = trainer.strategy
    assert isinstance(strategy, MoEStrategy)
    assert strategy.sharded is not None
    return strategy, strategy.sharded


def record(
    case: ParityCase, alone: bool = False, fault: Fault | None = None, model: type[LabModel] = LabModel
) -> RunRecord | None:
    """Train a case.

    Args:
        case: what to train.
        alone: in this process, with as many accumulated microbatches as the topology's processes compute together.
            Otherwise it is called in each of ``case.devices`` processes, with the environment that torchrun gives.
        fault: make this mistake.
        model: what to train.

    Returns:
        The record; ``None`` on all processes but the first.

    Raises:
        UserError: the fault would be without effect on this topology.
    """
    data_ranks = 1 if alone else case.mesh.data
    together = 1 if alone else case.parts
    recorder = Recorder(case, together)
    strategy = MoEStrategy(
        expert_parallel_size=1 if alone else case.expert_parallel,
        pipeline_parallel_size=1 if alone else case.pipeline_parallel,
        schedule=case.schedule,
        num_microbatches=case.num_microbatches,
        pipeline_split=None if alone else case.split,
        comm="auto" if alone else case.comm,
        shard_optimizer=case.shard_optimizer,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap,
        bucket_megabytes=0.02,  # several buckets, although the model is tiny
    )
    environment = LightningEnvironment() if alone or case.devices == 1 else TorchElasticEnvironment()
    trainer = Trainer(
        accelerator=case.accelerator,
        devices=1 if alone else case.devices,
        strategy=strategy,
        plugins=[environment, *([BF16Precision()] if case.precision == "bf16" else [])],
        callbacks=[recorder, *([FaultInjection(case, fault)] if fault else [])],
        max_steps=case.steps,
        max_epochs=-1,
        accumulate_grad_batches=case.accumulate * case.parts if alone else case.accumulate,
        gradient_clip_val=case.clip,
        use_distributed_sampler=False,  # each process has its own list
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rank = 0 if data_ranks == 1 else int(trainer.global_rank) % data_ranks
    batches = case.microbatches if alone else case.of_rank(rank)
    trainer.fit(model(case), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return recorder.run if trainer.global_rank == 0 else None
