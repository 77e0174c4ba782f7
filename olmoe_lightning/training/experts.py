"""Experts on their ranks: which process holds which, the plugins that carry tokens to them, and what was dropped."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from olmoe_lightning.errors import UserError
from olmoe_lightning.kernels import LocalTransport
from olmoe_lightning.kernels.transport import Dispatched
from olmoe_lightning.model.experts import Experts
from olmoe_lightning.model.moe import MoE
from olmoe_lightning.parallel.mesh import Axis, Mesh
from olmoe_lightning.plugins.comm.base import CommPlugin, CommSpec
from olmoe_lightning.plugins.comm.capacity import describe_drops
from olmoe_lightning.plugins.comm.registry import describe_choice, make_comm


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of which each rank of the ``expert`` axis holds its own part: the weights of our experts.

    A layer of another package marks its own with ``parameter.is_expert = True``.
    """
    ours = [
        weight for part in module.modules() if isinstance(part, Experts) for weight in (part.w_gate_up, part.w_down)
    ]
    return ours + [parameter for parameter in module.parameters() if getattr(parameter, "is_expert", False)]


def expert_tensors(module: nn.Module) -> list[Tensor]:
    """The same, and the buffers that go with them.

    Those are the buffers of a module that itself has such a parameter. A layer whose experts' weights are in its parts
    names its own ones in ``expert_buffers``.
    """
    parameters = expert_parameters(module)
    known = set(parameters)
    found: list[Tensor] = list(parameters)
    for part in module.modules():
        named: Collection[str] = getattr(part, "expert_buffers", ())
        own = any(parameter in known for parameter in part.parameters(recurse=False))
        found += [buffer for name, buffer in part.named_buffers(recurse=False) if own or name in named]
    return found


class _OutOfReach:
    """The transport of a layer behind its run: the experts of other processes cannot be reached."""

    fallbacks = 0

    def __init__(self, rank: int, ranks: int, experts: int) -> None:
        self.own = range(rank * experts // ranks, (rank + 1) * experts // ranks)
        self.experts = experts

    def dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Refuse.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"this process holds experts {self.own.start} to {self.own.stop - 1} of {self.experts}, and reaches the "
            "others only in fit, validate, test and predict; for all of them save a checkpoint with "
            "trainer.save_checkpoint, and load it in one process with load_from_checkpoint"
        )

    def combine(self, rows_RD: Tensor, handle: None) -> Tensor:
        """Nothing was dispatched."""
        raise AssertionError


class PlacedExperts:
    """The experts of one process, and the plugins that reach those of the others.

    Args:
        comm: see :class:`~olmoe_lightning.MoEStrategy`.
    """

    def __init__(self, comm: str | CommPlugin) -> None:
        self.comm = comm
        self._comms: dict[CommSpec, CommPlugin] = {}

    def check(self, module: nn.Module, ranks: int, device: torch.device) -> None:
        """Refuse what cannot work, before any process is started.

        Raises:
            UserError: the plugin cannot be used here, or the experts cannot be shared evenly.
        """
        make_comm(self.comm, ranks, device)
        experts = getattr(getattr(module, "config", None), "num_experts", None)
        if isinstance(experts, int) and experts % ranks:
            raise UserError(f"num_experts ({experts}) must be divisible by expert_parallel_size ({ranks})")

    def place(self, module: nn.Module, axis: Axis, device: torch.device, dtype: torch.dtype | None) -> int:
        """Keep the own experts of each MoE layer in ``module`` and connect it with the others'.

        Args:
            module: its weights may still be on the meta device, so that no process ever holds all experts.
            axis: the processes that share the experts.
            device: of the rows.
            dtype: of the rows; ``None``: that of the weights.

        Returns:
            Global index of the first own expert of the last layer (0 without layers).

        Raises:
            UserError: the experts cannot be shared evenly.
        """
        first = 0
        for layer in module.modules():
            if isinstance(layer, MoE):
                config = layer.config
                rows = dtype or layer.router.weight.dtype
                spec = CommSpec(config.num_experts, config.top_k, config.d_model, rows, device)
                layer.place(axis.rank, axis.size, self._plugin(spec, axis))
                first = axis.rank * config.num_experts // axis.size
        return first

    def _plugin(self, spec: CommSpec, axis: Axis) -> CommPlugin:
        if spec not in self._comms:
            # An instance is a prototype: layers of different sizes get a copy each.
            plugin = make_comm(copy.deepcopy(self.comm), axis.size, spec.device)
            plugin.setup(axis, spec)
            if self.comm == "auto" and not self._comms:
                rank_zero_info(describe_choice(self.comm, axis.size, spec.device))
            self._comms[spec] = plugin
        return self._comms[spec]

    @property
    def plugins(self) -> list[CommPlugin]:
        """Those in use: one, or one for each size of MoE layers."""
        return list(self._comms.values())

    def close(self, module: nn.Module | None) -> None:
        """Give up the plugins; layers that hold all their experts can be used without a Trainer, others say why not."""
        for plugin in self.plugins:
            plugin.teardown()
        for layer in module.modules() if module is not None else ():
            if isinstance(layer, MoE) and layer.placed is not None:
                rank, ranks = layer.placed
                experts = layer.config.num_experts
                layer.transport = LocalTransport(experts) if ranks == 1 else _OutOfReach(rank, ranks, experts)
        self._comms = {}

    # ---------------------------------------------------------------------------------------------- drops

    def own_drops(self) -> dict[str, dict[str, Tensor]]:
        """What each plugin dropped of this process' tokens: copies of its counters by name, on the device."""
        return {
            f"{plugin.name!r} ({spec.num_experts} experts)": plugin.drops.read()
            for spec, plugin in self._comms.items()
            if plugin.drops is not None
        }

    def sum_of_drops(self, own: dict[str, dict[str, Tensor]], mesh: Mesh) -> dict[str, dict[str, Tensor]]:
        """Add up counters over all processes; collective, whatever each of them has.

        The stages of a pipeline have different plugins, or none: a stage may consist of dense layers.

        Args:
            own: of this process, as :meth:`own_drops` gives them.
            mesh: the processes.

        Returns:
            The sums on the CPU, fp64, the same on all processes.
        """
        host = {name: {key: value.double().cpu() for key, value in found.items()} for name, found in own.items()}
        possible = mesh.pipeline.size > 1 or any(plugin.drops is not None for plugin in self.plugins)
        total: dict[str, dict[str, Tensor]] = {}
        for each in mesh.world.all_gather_objects(host) if possible else [host]:  # all processes decide alike
            for name, found in each.items():
                known = total.setdefault(name, {key: torch.zeros_like(value) for key, value in found.items()})
                for key, value in found.items():
                    known[key] += value
        return total

    def report_drops(self, mesh: Mesh) -> None:
        """Say what was dropped in a run, if anything was; collective."""
        for name, total in self.sum_of_drops(self.own_drops(), mesh).items():
            if total["dropped_by_expert"].any():
                rank_zero_warn(f"comm {name} had no capacity for all tokens: {describe_drops(total)}.")


def check_batches(dataloader: Any, most: float, mesh: Mesh, device: torch.device) -> None:
    """Ranks that exchange tokens must run the same number of batches; collective.

    Args:
        dataloader: one without a length is not checked.
        most: batches that it may be asked for.
        mesh: the processes.
        device: of the collective.

    Raises:
        UserError: they have different numbers.
    """
    try:
        length = len(dataloader)
    except (TypeError, NotImplementedError):
        return
    if mesh.expert.size == 1:
        return
    length = int(min(length, most))
    longest, shortest = mesh.data.all_reduce(torch.tensor([length, -length], device=device), dist.ReduceOp.MAX).tolist()
    if longest != -shortest:
        raise UserError(
            f"with expert parallelism every rank needs the same number of batches, but here ranks have from "
            f"{-shortest} to {longest} ({mesh} has {length}); pad the dataset, or use drop_last=True"
        )
