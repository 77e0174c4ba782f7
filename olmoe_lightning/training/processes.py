"""Processes on a mesh under Lightning: how they start, meet, talk and end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor
from typing_extensions import override

from olmoe_lightning._lightning import (
    ScriptLauncher,
    default_backend,
    distributed_is_initialized,
    init_process_group,
    reset_seed,
    trainer_of,
)
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel import Mesh, MeshShape

log = logging.getLogger(__name__)


class Launcher(ScriptLauncher):
    """Lightning's, which starts one process per device unless somebody else has; with a hook.

    Args:
        cluster_environment: as there.
        num_processes: as there.
        num_nodes: as there.
        before: called with the Trainer in each process, before a run begins.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        before: Callable[[Trainer], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._before = before

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None:
            self._before(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class MeshStrategy(ParallelStrategy):
    """What :class:`~olmoe_lightning.MoEStrategy` needs of several processes, without a word about what they compute.

    Args:
        pipeline_parallel_size: see :class:`~olmoe_lightning.MoEStrategy`.
        expert_parallel_size: see there.
        process_group_backend: see there.
        timeout: see there.
        kwargs: of Lightning's ``ParallelStrategy``.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(
        self,
        pipeline_parallel_size: int,
        expert_parallel_size: int,
        process_group_backend: str | None,
        timeout: timedelta,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for name, size in (
            ("pipeline_parallel_size", pipeline_parallel_size),
            ("expert_parallel_size", expert_parallel_size),
        ):
            if size < 1:
                raise UserError(f"{name} ({size}) must be at least 1")
        self.num_nodes = 1
        self.pipeline_parallel_size = pipeline_parallel_size
        self.expert_parallel_size = expert_parallel_size
        self.timeout = timeout
        self._backend = process_group_backend
        self._mesh: Mesh | None = None

    # ---------------------------------------------------------------------------------------------- topology

    @property
    def mesh(self) -> Mesh:
        """Where this process stands; there is one from the start of fit, validate, test or predict on."""
        if self._mesh is None:
            raise RuntimeError("the mesh exists once the Trainer has started its processes")
        return self._mesh

    @property
    def is_distributed(self) -> bool:
        """Lightning gives distributed samplers only to strategies that say so; one process needs none."""
        return self.num_nodes * self.num_processes > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The data rank: processes that hold stages of one pipeline see the same samples."""
        return {"num_replicas": self.mesh.data.size, "rank": self.mesh.data.rank}

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # Sizes that do not fit are told before a process is started.
        world = max(self.num_nodes * self.num_processes, 1)
        MeshShape.of_world(world, self.pipeline_parallel_size, self.expert_parallel_size)
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes, self._before_launch)

    def _before_launch(self, trainer: Trainer) -> None:
        """A run is asked for; nothing has been looked up for it yet, and no process been started."""

    def set_world_ranks(self) -> None:
        """Tell environment and rank-zero helpers the global rank; called by the Trainer."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        utilities_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # ---------------------------------------------------------------------------------------------- meeting

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        shape = MeshShape.of_world(self.world_size, self.pipeline_parallel_size, self.expert_parallel_size)
        if shape.world == 1:
            self._mesh = Mesh.single()
        elif self._mesh is None or self._mesh.shape != shape or self._mesh.world.size == 1:
            self._connect_processes()
            self._mesh = Mesh.create(shape)
        log.debug(f"{self.mesh} on {self.root_device}")

    def _connect_processes(self) -> None:
        assert self.cluster_environment is not None
        backend = self._backend or default_backend(self.root_device)
        environment = self.cluster_environment
        try:
            init_process_group(
                environment,
                backend,
                timeout=self.timeout,
                device_id=self.root_device if self.root_device.type != "cpu" else None,
            )
        except (RuntimeError, ValueError) as error:  # torch's DistNetworkError and DistStoreError are RuntimeErrors
            where = f"{environment.main_address}:{environment.main_port}"
            advice = connection_advice(str(error), where)
            raise RuntimeError(
                f"rank {self.global_rank} of {self.world_size} could not join the others over {backend}: {advice} "
                f"({str(error).splitlines()[0]})"
            ) from error

    # ---------------------------------------------------------------------------------------------- collectives

    @property
    def _interrupted(self) -> bool:
        """Whether this process failed, so that the others may not be where it is, and would not answer it."""
        trainer = trainer_of(self.lightning_module)
        several = self._mesh is not None and self._mesh.world.size > 1
        return several and trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    @property
    def _alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self._mesh is None or self._mesh.world.size == 1 or not distributed_is_initialized() or self._interrupted

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._alone:
            return
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._alone:
            return obj
        holder = [obj]
        dist.broadcast_object_list(holder, src)
        return holder[0]

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Sum over the processes that see different samples; those of one pipeline see the same ones.

        Args:
            tensor: the same shape on each; integers too.

        Returns:
            A new tensor, the same on every process.
        """
        result = tensor.detach().to(self.root_device).clone()
        return result if self._alone else self.mesh.data.all_reduce(result)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor if self._alone else super().all_gather(tensor, group, sync_grads)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Sum or average over all processes; the same value on each.

        Args:
            tensor: what is not a tensor is returned as it is.
            group: a process group in place of all.
            reduce_op: ``mean``, ``avg``, ``sum``, or an operation of ``torch.distributed``.
        """
        if self._alone or not isinstance(tensor, Tensor):
            return tensor
        mean = reduce_op is None or (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"))
        if isinstance(reduce_op, str) and not mean:
            operation = getattr(dist.ReduceOp, reduce_op.upper())
        else:
            operation = dist.ReduceOp.SUM if mean else reduce_op
        result = tensor.detach().to(self.root_device).clone()
        dist.all_reduce(result, op=operation, group=group)
        return result / dist.get_world_size(group) if mean else result

    # ---------------------------------------------------------------------------------------------- the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Name the process that failed, and do not leave children waiting for it."""
        if self._mesh is not None and self._mesh.world.size > 1:
            log.error(f"{self._mesh} failed: {type(exception).__name__}: {exception}")
            children = getattr(self.launcher, "procs", [])
            deadline = time.monotonic() + 12.0  # they may be about to say what went wrong first
            while any(child.poll() is None for child in children) and time.monotonic() < deadline:
                time.sleep(0.1)
            for child in children:
                if child.poll() is None:
                    child.terminate()


def connection_advice(error: str, where: str) -> str:
    """What to do about an error of ``init_process_group``."""
    text = error.lower()
    if "eaddrinuse" in text or "address already in use" in text:
        return f"another program uses {where}; set MASTER_PORT to a free port, or stop that program"
    if "unable to find address" in text or "unable to find interface" in text or "no such device" in text:
        return "the network interface named in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME does not exist on this host"
    if "timed out" in text or "timeout" in text or "connect" in text:
        return (
            f"not all processes met at {where}; check that each was started, with the same MASTER_ADDR, MASTER_PORT "
            "and WORLD_SIZE, and that no firewall is between them"
        )
    return f"see the cause above; the processes meet at {where}"
