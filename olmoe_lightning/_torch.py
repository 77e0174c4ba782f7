"""Every name that torch does not promise to keep, in one place; a test fails when one of them moves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch import _assert_async as assert_async
from torch._C import _will_engine_execute_node as will_execute_node
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

__all__ = [
    "Store",
    "SymmetricHandle",
    "TorchDispatchMode",
    "assert_async",
    "default_store",
    "foreach_mul_",
    "gradient_dtypes",
    "group_timeout",
    "is_last_hook",
    "is_view",
    "parts_of_schedule",
    "rebuild_tensor",
    "rendezvous",
    "set_group_timeout",
    "set_last_rates",
    "storage_info",
    "symmetric_backend",
    "symmetric_memory",
    "version",
    "will_execute_node",
]


def foreach_mul_(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by one number; torch refuses an empty list."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def gradient_dtypes(node: Node) -> list[torch.dtype]:
    """Of the gradients that come into a node of a backward pass."""
    return [metadata.dtype for metadata in node._input_metadata]


def is_last_hook(parameter: Tensor, hook: RemovableHandle) -> bool:
    """Whether a post-accumulate-grad hook of a parameter is called behind all others."""
    hooks = parameter._post_accumulate_grad_hooks
    return next(reversed(hooks), None) == hook.id


def parts_of_schedule(scheduler: Any) -> list[Any]:
    """The schedulers of which a sequence or a chain is made, or the one itself."""
    parts = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(part for each in parts for part in parts_of_schedule(each))]


def set_last_rates(scheduler: Any, rates: list[Any]) -> None:
    """What a scheduler says that it has set last."""
    scheduler._last_lr = rates


def version(tensor: Tensor) -> int:
    """Grows with each write to the tensor, or to another of the same storage that does not come from ``.data``."""
    return tensor._version


class Store(Protocol):
    """What processes know of each other before they have a process group, and beside it."""

    def set(self, key: str, value: str) -> None:
        """Make a value known to all."""

    def get(self, key: str) -> bytes:
        """Wait for a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether there are values of all these keys."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long this process waits for values from now on."""


class SymmetricHandle(Protocol):
    """Memory that the ranks of a group have mapped from each other; owns the mappings."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """A view of a rank's memory."""

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Queue a barrier of the group on the current stream."""


def symmetric_backend(device: torch.device) -> str | None:
    """What shares memory between devices of this kind; ``None`` when this build of torch has nothing that does."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.get_backend(device)


def symmetric_memory(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] that other devices may map, not from torch's pool of such memory."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def rendezvous(memory: Tensor, group: dist.ProcessGroup) -> SymmetricHandle:
    """Map the :func:`symmetric_memory` of all ranks; collective."""
    from torch.distributed import _symmetric_memory

    return cast(SymmetricHandle, _symmetric_memory.rendezvous(memory, group))


def storage_info(path: str, offset: int, length: int) -> object:
    """Where a part of a checkpoint lies, as the metadata of ``torch.distributed.checkpoint``'s file system has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one."""
    return tensor._is_view()


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long an operation of a group's CPU backend waits for the others.

    Raises:
        AttributeError, RuntimeError: the group has none.
    """
    return group._get_backend(torch.device("cpu")).options._timeout


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long collectives of a group wait for the others from now on; backends that cannot change it keep theirs."""
    if any(backend in dist.get_backend(group) for backend in ("gloo", "nccl")):
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def default_store() -> Store:
    """The store by which the processes of the default group have found each other."""
    return cast(Store, dist.distributed_c10d._get_default_store())
