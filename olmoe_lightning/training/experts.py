"""Experts on their ranks: which process holds which, and the plugins that carry tokens to them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from olmoe_lightning.errors import UserError
from olmoe_lightning.kernels import LocalTransport
from olmoe_lightning.model.moe import MoE
from olmoe_lightning.plugins.comm.base import CommPlugin, CommSpec
from olmoe_lightning.plugins.comm.capacity import DropCounters, describe_drops
from olmoe_lightning.plugins.comm.registry import describe_choice, make_comm
from olmoe_lightning.training.checks import most_batches
from olmoe_lightning.training.pipeline import PipelineStrategy


class ExpertStrategy(PipelineStrategy):
    """The experts' part of :class:`~olmoe_lightning.MoEStrategy`.

    Args:
        args: of :class:`PipelineStrategy`.
        comm: see :class:`~olmoe_lightning.MoEStrategy`.
        kwargs: of :class:`PipelineStrategy`.
    """

    def __init__(self, *args: Any, comm: str | CommPlugin, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.comm = comm
        self._comms: dict[CommSpec, CommPlugin] = {}

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        make_comm(self.comm, self.expert_parallel_size, self.root_device)
        experts = getattr(getattr(model, "config", None), "num_experts", None)
        if isinstance(experts, int) and experts % self.expert_parallel_size:
            raise UserError(
                f"num_experts ({experts}) must be divisible by expert_parallel_size ({self.expert_parallel_size})"
            )

    def place_experts(self, module: nn.Module) -> int:
        """Keep the own experts of each MoE layer in ``module`` and connect it with the others'.

        Called by the strategy on the whole LightningModule; a module may call it earlier, while its weights are still
        on the meta device, so that no process ever holds all experts.

        Returns:
            Global index of the first own expert of the last layer (0 without layers).

        Raises:
            ValueError: the experts cannot be shared evenly.
        """
        first = 0
        axis = self.mesh.expert
        for layer in module.modules():
            if isinstance(layer, MoE):
                layer.place(axis.rank, axis.size, self._comm_of(layer))
                first = axis.rank * layer.config.num_experts // axis.size
        return first

    @property
    def comm_plugins(self) -> list[CommPlugin]:
        """Those in use: one, or one for each size of MoE layers."""
        return list(self._comms.values())

    @override
    def on_train_end(self) -> None:
        """Say what was left out for want of room, if anything was."""
        super().on_train_end()
        for name, total in self.sum_of_drops(self.own_drops()).items():
            if total["dropped_by_expert"].any():
                rank_zero_warn(f"comm {name} had no room for all tokens: {describe_drops(total)}.")

    def own_drops(self) -> dict[str, dict[str, Tensor]]:
        """What each plugin had no room for, of this process' tokens: copies of its counters by name, on the device."""
        return {
            f"{plugin.name!r} ({spec.num_experts} experts)": plugin.drops.read()
            for spec, plugin in self._comms.items()
            if plugin.drops is not None
        }

    def sum_of_drops(self, own: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Add up counters over all processes; collective, whatever each of them has.

        The stages of a pipeline have different plugins, or none: a stage may consist of dense layers.

        Args:
            own: of this process, as :meth:`own_drops` gives them.

        Returns:
            The sums on the CPU, fp64, the same on all processes.
        """
        host = {name: {key: value.double().cpu() for key, value in found.items()} for name, found in own.items()}
        everyone = [host]
        if self.mesh.world.size > 1 and self._drops_possible():
            everyone = [{}] * self.mesh.world.size
            dist.all_gather_object(everyone, host)
        total: dict[str, dict[str, Tensor]] = {}
        for each in everyone:
            for name, found in each.items():
                known = total.setdefault(name, {key: torch.zeros_like(value) for key, value in found.items()})
                for key, value in found.items():
                    known[key] += value
        return total

    drop_rates = staticmethod(DropCounters.rates)

    def _drops_possible(self) -> bool:
        """Whether any process may count drops; all say the same."""
        return self.mesh.pipeline.size > 1 or any(plugin.drops is not None for plugin in self.comm_plugins)

    def _comm_of(self, layer: MoE) -> CommPlugin:
        config = layer.config
        dtype = getattr(self.precision_plugin, "param_dtype", None) or layer.router.weight.dtype
        spec = CommSpec(config.num_experts, config.top_k, config.d_model, dtype, self.root_device)
        if spec not in self._comms:
            axis = self.mesh.expert
            # An instance is a pattern: layers of different sizes get a copy each.
            plugin = make_comm(copy.deepcopy(self.comm), axis.size, self.root_device)
            plugin.setup(axis, spec)
            if self.comm == "auto" and not self._comms:
                rank_zero_info(describe_choice(self.comm, axis.size, self.root_device))
            self._comms[spec] = plugin
        return self._comms[spec]

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Ranks that exchange tokens must run the same number of batches."""
        try:
            length = len(dataloader)
        except (TypeError, NotImplementedError):
            return dataloader
        if self.mesh.expert.size > 1:
            length = int(min(length, most_batches(self.lightning_module.trainer)))  # type: ignore[union-attr]
            lengths = torch.tensor([length, -length], device=self.root_device)
            longest, shortest = self.mesh.data.all_reduce(lengths, dist.ReduceOp.MAX).tolist()
            if longest != -shortest:
                raise UserError(
                    f"with expert parallelism every rank needs the same number of batches, but here ranks have from "
                    f"{-shortest} to {longest} ({self.mesh} has {length}); pad the dataset, or use drop_last=True"
                )
        return dataloader

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        for plugin in self._comms.values():
            plugin.teardown()
        for layer in module.modules() if module is not None else ():
            if isinstance(layer, MoE) and layer.placed == (0, 1):
                layer.transport = LocalTransport(layer.config.num_experts)  # usable without a Trainer
        self._comms = {}
        super().teardown()


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a shard of the experts: replicated over ``expert_replica`` alone."""
    return bool(getattr(parameter, "is_expert", False))
