"""ExpertLoadMonitor: is the work spread over the experts, layer by layer, and does the router know what it wants.

Shape letters: L MoE layers, E experts, K experts chosen per token, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from olmoe_lightning.callbacks._drops import DropWindow
from olmoe_lightning.callbacks._logging import log_scalars, logged_step, tensorboards
from olmoe_lightning.callbacks.heat_map import draw_heat_map
from olmoe_lightning.errors import UserError

# For each metric, the direction in which a layer is worse than another.
_WORST = {
    "max_over_mean": max,
    "dead_experts": max,
    "load_entropy": min,
    "router_entropy": min,
    "balance_loss": max,
    "centred_product": min,
}


class ExpertLoadMonitor(Callback):
    """Logs the load of the experts per layer, as numbers and as pictures.

    The module keeps the statistics of its last batch in ``routing_stats``; this callback adds them up on the device
    over all batches of a window and copies them to the host once, when it reports. Training windows run from report
    to report. Every validation is a window of its own, under ``val_load/``; the sanity check is in neither.

    Reported per layer as ``load/layer_NN/<metric>`` (NN is the number of the block), and as ``load/<metric>`` (mean
    over layers) and ``load/<metric>_worst`` (worst layer), see ``docs/monitoring.md``: ``max_over_mean``,
    ``dead_experts``, ``load_entropy``, ``router_entropy``, ``balance_loss``, ``centred_product``. Means and worst
    values are in ``trainer.callback_metrics`` too.

    Where a communication plugin has a limited capacity, what it dropped in training is reported as ``drops/<rate>``,
    see :meth:`olmoe_lightning.plugins.comm.DropCounters.rates`; ``drops.counts`` has the window's counters, by expert
    and by process.

    Args:
        every_n_steps: optimizer steps between reports in training.
        heatmaps: draw expert × layer pictures into every TensorBoard logger.
        heatmap_every_n_steps: optimizer steps between pictures in training, rounded up to the next report. A picture
            takes some tenths of a second.
        per_layer: log every layer, not only mean and worst.

    Raises:
        UserError: a number is out of range.
    """

    reads_weights_between_steps = False

    def __init__(
        self,
        every_n_steps: int = 50,
        heatmaps: bool = True,
        heatmap_every_n_steps: int = 200,
        per_layer: bool = True,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("heatmap_every_n_steps", heatmap_every_n_steps)):
            if value < 1:
                raise UserError(f"{name} ({value}) must be at least 1")
        self.every_n_steps = every_n_steps
        self.heatmaps = heatmaps
        self.heatmap_every_n_steps = heatmap_every_n_steps
        self.per_layer = per_layer
        self.latest: dict[str, float] = {}
        """The newest value of every metric, by name."""
        self.drops = DropWindow()
        """What was dropped in the last window of training."""
        self._enabled = True
        self._draws = False
        self._training: RoutingSums | None = None
        self._validation: RoutingSums | None = None
        self._step = 0
        self._reported_step = 0
        self._picture_step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        config: Any = getattr(pl_module, "config", None)
        missing = [name for name in ("num_moe_layers", "num_experts", "top_k") if not hasattr(config, name)]
        self._enabled = hasattr(pl_module, "routing_stats") and not missing
        if not self._enabled:
            rank_zero_warn(
                f"ExpertLoadMonitor does nothing: {type(pl_module).__name__} needs an attribute `routing_stats` and a "
                "`config` with num_moe_layers, num_experts and top_k."
            )
        elif config.num_moe_layers == 0:
            self._enabled = False
            rank_zero_info("ExpertLoadMonitor does nothing: the model has no MoE layers.")
        self._draws = self._enabled and self.heatmaps and bool(tensorboards(trainer))
        if self._enabled and self.heatmaps and not self._draws and trainer.loggers:
            rank_zero_info("ExpertLoadMonitor draws no heat maps: none of the loggers is a TensorBoardLogger.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training = None
        self._validation = None
        self.drops = DropWindow()
        self._step = self._reported_step = self._picture_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        self._training = _accumulated(self._training, pl_module)
        stepped = trainer.global_step != self._step
        self._step = trainer.global_step
        if stepped and self._step % self.every_n_steps == 0:
            means = self._report_training(trainer, pl_module, last=False)
            pl_module.log_dict(means, logger=False, batch_size=1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A condition that is equal on all ranks: either all of them reduce here or none does.
        if self._enabled and self._step != self._reported_step:
            self._report_training(trainer, pl_module, last=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation = None

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._enabled and not trainer.sanity_checking:
            self._validation = _accumulated(self._validation, pl_module)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._enabled or trainer.sanity_checking:
            return
        means = self._report(trainer, pl_module, self._validation, "val_load", draw=True)
        self._validation = None
        pl_module.log_dict(means, logger=False, batch_size=1, sync_dist=trainer.world_size > 1)

    def _report_training(self, trainer: Trainer, pl_module: LightningModule, last: bool) -> dict[str, float]:
        draw = last or self._step - self._picture_step >= self.heatmap_every_n_steps
        if draw:
            self._picture_step = self._step
        self._reported_step = self._step
        means = self._report(trainer, pl_module, self._training, "load", draw)
        self._training = None
        rates = {f"drops/{name}": value for name, value in self.drops.report(trainer).items()}
        self.latest |= rates
        log_scalars(trainer, rates, logged_step(trainer))
        return means | rates

    def _report(
        self, trainer: Trainer, pl_module: LightningModule, sums: RoutingSums | None, prefix: str, draw: bool
    ) -> dict[str, float]:
        """Reduce over ranks, log, draw. Returns the metrics over all layers."""
        config: Any = pl_module.config
        if sums is None:  # this rank had no batch, but the others may wait in the reduction
            device = trainer.strategy.root_device
            sums = RoutingSums.zeros(config.num_moe_layers, config.num_experts, device)
        reduced = trainer.strategy.reduce(sums.flat(), reduce_op="sum")
        assert isinstance(reduced, Tensor)
        total = RoutingSums.from_flat(reduced.cpu(), config.num_moe_layers, config.num_experts)
        if not total.counts.any():
            return {}
        # Blocks are numbered through, and the dense ones lead.
        first = int(getattr(config, "num_dense_layers", 0))
        layers = [first + layer for layer in range(config.num_moe_layers)]
        by_layer = load_metrics(total, config.top_k)
        means: dict[str, float] = {}
        scalars: dict[str, float] = {}
        for metric, tensor in by_layer.items():
            values = tensor.tolist()
            means[f"{prefix}/{metric}"] = math.fsum(values) / len(values)
            means[f"{prefix}/{metric}_worst"] = _WORST[metric](values)
            if self.per_layer:
                scalars |= {f"{prefix}/layer_{n:02d}/{metric}": v for n, v in zip(layers, values, strict=True)}
        scalars |= means
        self.latest |= scalars
        step = logged_step(trainer)
        log_scalars(trainer, scalars, step)
        if draw and self._draws and trainer.is_global_zero:
            title = f"{'validation' if prefix == 'val_load' else 'training'}, step {step + 1}"
            picture = draw_heat_map(total.load(), total.probability(), layers, title)
            for logger in tensorboards(trainer):
                logger.experiment.add_image(f"{prefix}/heat_map", picture, step, dataformats="HWC")
        return means


@dataclass
class RoutingSums:
    """Routing statistics added up over batches.

    Args:
        counts: [L, E] requested assignments.
        prob_sum: [L, E] sum over tokens of the router's probabilities.
        entropy_sum: [L] sum over tokens of the entropy of those, in nats.
        balance_sum: [L] balance loss without its coefficient, weighted by tokens.
    """

    counts: Tensor
    prob_sum: Tensor
    entropy_sum: Tensor
    balance_sum: Tensor

    @classmethod
    def zeros(cls, num_layers: int, num_experts: int, device: torch.device) -> RoutingSums:
        """Sums over nothing. FP64 counts exactly to 2^53, where the device has it."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return cls.from_flat(
            torch.zeros(2 * num_layers * (num_experts + 1), dtype=dtype, device=device), num_layers, num_experts
        )

    @classmethod
    def from_flat(cls, flat: Tensor, num_layers: int, num_experts: int) -> RoutingSums:
        """The inverse of :meth:`flat`; the fields are views."""
        matrix = num_layers * num_experts
        counts, prob_sum, entropy_sum, balance_sum = flat.split([matrix, matrix, num_layers, num_layers])
        shape = (num_layers, num_experts)
        return cls(counts.view(shape), prob_sum.view(shape), entropy_sum, balance_sum)

    def flat(self) -> Tensor:
        """Everything in one new tensor, for one reduction and one copy."""
        return torch.cat([self.counts.flatten(), self.prob_sum.flatten(), self.entropy_sum, self.balance_sum])

    def add(self, stats: Any) -> None:
        """Add one batch's ``routing_stats``, on its device."""
        self.counts += stats.counts
        self.prob_sum += stats.prob_sum
        self.entropy_sum += stats.entropy_sum
        self.balance_sum += stats.balance_sum

    def load(self) -> Tensor:
        """F [L, E]: each expert's share of the requested assignments."""
        return self.counts / self.counts.sum(-1, keepdim=True).clamp_min(1)

    def probability(self) -> Tensor:
        """P [L, E]: each expert's mean probability; a row sums to 1 because a token's probabilities do."""
        return self.prob_sum / self.prob_sum.sum(-1, keepdim=True).clamp_min(torch.finfo(self.prob_sum.dtype).tiny)


def load_metrics(sums: RoutingSums, top_k: int) -> dict[str, Tensor]:
    """The monitor's numbers for each layer.

    With f_e = c_e / (K T) the share of assignments, P_e the mean probability, u = 1/E, the balance loss of the window
    is E Σ f P = 1 + E (f - u)·(P - u), since both sum to 1: it sees load only through this product. A negative product
    beside a high max/mean means that crowded experts win by small margins, and that the loss pushes the wrong way.

    Args:
        sums: a window's sums.
        top_k: K.

    Returns:
        metric to [L], float: ``max_over_mean``; ``dead_experts``; ``load_entropy``, of f, divided by log E;
        ``router_entropy``, mean over tokens in nats; ``balance_loss``, mean over tokens of what each batch had;
        ``centred_product``, E (f - u)·(P - u) of the window.
    """
    num_experts = sums.counts.shape[-1]
    # Every counted token asks for K experts. Taken per layer, this stays right when a rank holds only some of the
    # layers.
    tokens = (sums.counts.sum(-1) / top_k).clamp_min(1)
    load, probability = sums.load(), sums.probability()
    uniform = 1 / num_experts
    entropy = torch.special.entr(load).sum(-1)
    return {
        "max_over_mean": load.amax(-1) * num_experts,
        "dead_experts": (sums.counts == 0).sum(-1).to(load.dtype),
        "load_entropy": entropy / math.log(num_experts) if num_experts > 1 else torch.ones_like(entropy),
        "router_entropy": sums.entropy_sum / tokens,
        "balance_loss": sums.balance_sum / tokens,
        "centred_product": num_experts * ((load - uniform) * (probability - uniform)).sum(-1),
    }


def _accumulated(sums: RoutingSums | None, pl_module: LightningModule) -> RoutingSums | None:
    stats: Any = pl_module.routing_stats
    if stats is None:
        return sums
    if sums is None:
        num_layers, num_experts = stats.counts.shape
        sums = RoutingSums.zeros(num_layers, num_experts, stats.counts.device)
    sums.add(stats)
    return sums
