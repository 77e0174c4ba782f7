"""The processes of a run: how they are launched, join to a mesh, exchange values for Lightning, and end."""

from __future__ import annotations

import inspect
import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from olmoe_lightning._lightning import ScriptLauncher, default_backend, distributed_is_initialized, init_process_group
from olmoe_lightning._torch import default_store
from olmoe_lightning.errors import UserError
from olmoe_lightning.parallel import Mesh, MeshShape
from olmoe_lightning.parallel.at_exit import settle_at_exit
from olmoe_lightning.training.alarm import Alarm, end_processes

log = logging.getLogger(__name__)

_GRACE_SECONDS = 12.0
"""How long children of a process that failed have to say what went wrong with them, before they are ended."""


class Launcher(ScriptLauncher):
    """Lightning's, which starts one process per device unless another launcher has; with a hook.

    Args:
        cluster_environment: as there.
        num_processes: as there.
        num_nodes: as there.
        before: called in each process before a run begins, with the Trainer and what it was given, by name: module,
            data, which checkpoint.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        before: Callable[[Trainer, Mapping[str, Any]], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._before = before

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None:
            self._before(trainer, inspect.signature(function).bind(*args, **kwargs).arguments)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class Processes:
    """The processes of a run: joins them to a mesh, and makes the collectives that Lightning asks for.

    Args:
        pipeline_size: see :class:`~olmoe_lightning.MoEStrategy`.
        expert_size: see there.
        backend: see there.
        timeout: see there.
        is_interrupted: whether this process failed, so that the others may be elsewhere, and would not answer it.

    Raises:
        UserError: a size is not positive.
    """

    def __init__(
        self,
        pipeline_size: int,
        expert_size: int,
        backend: str | None,
        timeout: timedelta,
        is_interrupted: Callable[[], bool],
    ) -> None:
        for name, size in (("pipeline_parallel_size", pipeline_size), ("expert_parallel_size", expert_size)):
            if size < 1:
                raise UserError(f"{name} ({size}) must be at least 1")
        self.pipeline_size = pipeline_size
        self.expert_size = expert_size
        self.timeout = timeout
        self._backend = backend
        self._is_interrupted = is_interrupted
        self._mesh: Mesh | None = None
        self._device = torch.device("cpu")
        self._alarm: Alarm | None = None  # while there is a run of several processes

    def shape(self, world_size: int) -> MeshShape:
        """The mesh of so many processes.

        Raises:
            UserError: the sizes do not fit.
        """
        return MeshShape.of_world(max(world_size, 1), self.pipeline_size, self.expert_size)

    def join(self, environment: ClusterEnvironment, world_size: int, device: torch.device) -> None:
        """Join the process group; later runs of this process reuse it.

        Raises:
            RuntimeError: they could not be reached.
        """
        self._device = device
        shape = self.shape(world_size)
        if shape.world == 1:
            self._mesh = Mesh.single()
        else:
            self._connect(environment, world_size)  # nothing to do if they have joined before
            default_store().set_timeout(self.timeout)
            self._mesh = Mesh.create(shape, self.timeout)
        log.debug(f"{self.mesh} on {device}")

    def open(self) -> None:
        """A run begins; from now on the end of one process is that of all; collective."""
        self.close()
        if self.is_distributed:
            self._alarm = Alarm(self.mesh)

    def close(self) -> None:
        """The run of this process is over."""
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    def _connect(self, environment: ClusterEnvironment, world_size: int) -> None:
        device = self._device
        backend = self._backend or default_backend(device)
        settle_at_exit()
        try:
            init_process_group(
                environment, backend, timeout=self.timeout, device_id=device if device.type != "cpu" else None
            )
        except (RuntimeError, ValueError) as error:  # torch's DistNetworkError and DistStoreError are RuntimeErrors
            where = f"{environment.main_address}:{environment.main_port}"
            raise RuntimeError(
                f"rank {environment.global_rank()} of {world_size} could not join the others over {backend}: "
                f"{connection_advice(str(error), where)} ({str(error).splitlines()[0]})"
            ) from error

    @property
    def mesh(self) -> Mesh:
        """Where this process stands."""
        if self._mesh is None:
            raise RuntimeError("the mesh exists once the Trainer has started its processes")
        return self._mesh

    @property
    def is_distributed(self) -> bool:
        """Whether this process has joined others."""
        return self._mesh is not None and self._mesh.world.size > 1

    @property
    def interrupted(self) -> bool:
        """Whether there are others, and this process failed, so that they would not answer."""
        return self.is_distributed and self._is_interrupted()

    @property
    def can_communicate(self) -> bool:
        """Whether there are others that take part in collectives."""
        return self.is_distributed and distributed_is_initialized() and not self.interrupted

    # ---------------------------------------------------------------------------------------------- collectives

    def barrier(self) -> None:
        """Return when all processes have called it."""
        if self.can_communicate:
            dist.barrier(device_ids=[self._device.index] if self._device.type == "cuda" else None)

    def broadcast(self, value: Any, source: int) -> Any:
        """The object of one process on all of them."""
        return self.mesh.world.broadcast_object(value, source) if self.can_communicate else value

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over the processes that see different samples."""
        result = tensor.detach().to(self._device).clone()
        return self.mesh.data.all_reduce(result) if self.can_communicate else result

    def reduce(self, tensor: Tensor | Any, group: Any | None, reduce_op: Any) -> Tensor | Any:
        """A new tensor: ``mean``, ``avg``, ``sum``, or what an operation of ``torch.distributed`` makes of all."""
        if not self.can_communicate or not isinstance(tensor, Tensor):
            return tensor
        mean = reduce_op is None or (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"))
        if isinstance(reduce_op, str) and not mean:
            reduce_op = getattr(dist.ReduceOp, reduce_op.upper())
        result = tensor.detach().to(self._device).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=dist.ReduceOp.SUM if mean else reduce_op, group=group)
        return result / dist.get_world_size(group) if mean else result

    # ---------------------------------------------------------------------------------------------- the end

    def end_others(self, exception: BaseException, children: Sequence[subprocess.Popen[bytes]]) -> None:
        """Name the process that failed, and leave none of the others waiting for it.

        Args:
            exception: of this process.
            children: processes that it started.
        """
        if not self.is_distributed:
            return
        message = f"{self._mesh} failed: {type(exception).__name__}: {exception}"
        log.error(message)
        if self._alarm is not None:
            self._alarm.sound(message)
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = {child.pid: child for child in children if child.poll() is None}
        end_processes(list(left), lambda pid: left[pid].poll() is not None)


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
