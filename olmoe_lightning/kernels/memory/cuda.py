"""Symmetric memory of GPUs that reach each other directly: of one host, or of one NVLink domain; by torch's own.

Host numbers travel over a gloo group of the same processes, which waits for no device. A barrier is a kernel on the
current stream: what it orders is the work of that stream, so all exchanges of a process belong on one stream. A process
that does not come shows at the next host exchange, which names it, or as a barrier that gives up after the timeout.

``torch.distributed._symmetric_memory`` is private and may change; its names are in ``_torch.py``. Written for torch
2.11 to 2.13.
"""

from __future__ import annotations

import ctypes
import datetime
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from olmoe_lightning._torch import rendezvous, symmetric_backend, symmetric_memory
from olmoe_lightning.kernels.memory.host import gather_numbers, gather_objects
from olmoe_lightning.kernels.memory.symmetric import MAX_NUMBERS, Region, SymmetricMemory
from olmoe_lightning.kernels.memory.virtual import VirtualMemory, VirtualRanks

ELSEWHERE = (
    "it needs GPUs that address each other's memory, which those of one host or of one NVLink domain can; take "
    "'all_to_all', which runs over any network, or 'deepep' for GPUs of several hosts"
)
"""What to do where they cannot."""


def cuda_memory_missing() -> str | None:
    """Why GPUs cannot share memory with this build of torch; ``None`` when they can, if they reach each other."""
    if not dist.is_available():
        return "this build of torch has no torch.distributed"
    try:
        backend = symmetric_backend(torch.device("cuda"))
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"torch {torch.__version__} has no symmetric memory as it is known here ({error})"
    if backend is None:
        return f"torch {torch.__version__} was built without symmetric memory for CUDA"
    return None


class DeviceRegion(Region):
    """Memory of devices.

    Args:
        parts: by rank, uint8 [nbytes]; what they are made of is kept by them or by ``keep``.
        nbytes: of each.
        keep: lives as long as a tensor of the region.
    """

    def __init__(self, parts: Sequence[Tensor], nbytes: int, keep: Any = None) -> None:
        super().__init__(nbytes)
        self._parts, self._keep = parts, keep

    @override
    def storage(self, rank: int, on_release: Callable[[], None] | None = None) -> Tensor:
        """All bytes of a process' part, addressed through this device.

        Args:
            rank: of the process.
            on_release: called when the last tensor of this storage is gone; work that reads it may still be queued.
        """
        # The same memory under a new storage. What hangs on the storage's Python object lives as long as the storage.
        tensor = torch.utils.dlpack.from_dlpack(self._parts[rank])
        tensor.untyped_storage().use_of_region = _Use(self, on_release)  # type: ignore[attr-defined]
        return tensor


class _Use:
    """Of a region by one storage: what is gone when the storage is."""

    def __init__(self, region: DeviceRegion, on_release: Callable[[], None] | None) -> None:
        self._region, self._on_release = region, on_release

    def __del__(self) -> None:
        if self._on_release is not None:
            self._on_release()


class VirtualDeviceMemory(VirtualMemory):
    """One virtual rank's view of memory on a device: threads that share a GPU and its stream, or a single process.

    Args:
        ranks: what the virtual ranks have in common.
        rank: of this one.
        device: of all.
    """

    def __init__(self, ranks: VirtualRanks, rank: int, device: torch.device) -> None:
        super().__init__(ranks, rank)
        self._device = device

    @override
    def allocate(self, nbytes: int) -> Region:
        """A part of each rank, from torch's allocator."""
        own = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self._device)
        return DeviceRegion(self._gather(own), len(own))


class _Place(NamedTuple):
    """Where a process' GPU is."""

    host: str
    device: int
    reaches: tuple[int, ...]
    """Devices of its host that it can address directly."""
    domain: str | None
    """Of the NVLink domain, where one spans hosts."""


class CudaMemory(SymmetricMemory):
    """Memory of the GPUs of a group; made by all of them together.

    Args:
        group: of the processes, one GPU each.
        device: of this process.
        timeout: seconds that a process waits for another, on the host and on the device.

    Raises:
        ValueError: on all processes, when they do not reach each other's memory; the message says what to take instead.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float = 1800) -> None:
        self.group, self.device, self.timeout = group, device, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._host = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=datetime.timedelta(seconds=timeout),
            backend="gloo",
            use_local_synchronization=True,
        )
        # All processes learn of a problem before torch's rendezvous, which would wait for those that do not come.
        try:
            place: _Place | str = _place(device)
        except RuntimeError as error:
            place = f"rank {self.rank} cannot use its GPU {device}: {error}"
        if problem := unreachable(gather_objects(self._host, place)):
            raise ValueError(f"{problem}: {ELSEWHERE}")
        failed = None
        try:
            self._barrier = self._make(4096)
        except Exception as error:  # whatever it is, the others must know
            failed = f"rank {self.rank} cannot map the memory of the other GPUs: {error}"
        if failures := [each for each in gather_objects(self._host, failed) if each]:
            raise ValueError(f"{failures[0]}: {ELSEWHERE}")

    def _make(self, nbytes: int) -> tuple[DeviceRegion, Any]:
        # Not from torch's pool of such memory: what a process gets from it depends on what that process has given back.
        with torch.cuda.device(self.device):
            own = symmetric_memory(nbytes, self.device)
            handle = rendezvous(own, self.group)
            parts = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.size)]
        # The parts do not own what they show; the handle owns the mappings of all, also of what a peer has given back.
        return DeviceRegion(parts, nbytes, keep=(own, handle)), handle

    @override
    def allocate(self, nbytes: int) -> Region:
        """Taken at once; collective, and it waits for the device."""
        return self._make(max(nbytes, 16))[0]

    @override
    def exchange(self, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Numbers over the host; the barrier is put onto the current stream."""
        if len(numbers) > MAX_NUMBERS:
            raise ValueError(f"an exchange carries at most {MAX_NUMBERS} numbers, got {len(numbers)}")
        found: list[tuple[int, ...]] = gather_numbers(self._host, numbers) if numbers else [()] * self.size
        with torch.cuda.device(self.device):
            self._barrier[1].barrier(channel=0, timeout_ms=int(1000 * self.timeout))
        return found

    @override
    def close(self) -> None:
        """Nothing is given up: regions live while tensors of them do, and the host's group while its parent does.

        Were that group destroyed, the next of the same ranks would have its name, and find its old addresses.
        """


def _place(device: torch.device) -> _Place:
    count = torch.cuda.device_count()
    own = device.index if device.index is not None else torch.cuda.current_device() if count else 0
    if own >= count:
        raise RuntimeError(f"this process sees {count} GPUs")
    reaches = tuple(each for each in range(count) if each == own or torch.cuda.can_device_access_peer(own, each))
    return _Place(socket.gethostname(), own, reaches, _nvlink_domain(own))


def unreachable(found: Sequence[_Place | str]) -> str | None:
    """Why GPUs at these places cannot address each other's memory; ``None`` when they can.

    Args:
        found: by rank; a text says why there is no GPU.
    """
    places = [each for each in found if not isinstance(each, str)]
    if len(places) < len(found):
        return next(each for each in found if isinstance(each, str))
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        domains = {place.domain for place in places}
        if None in domains or len(domains) > 1:
            return f"the GPUs are on hosts {', '.join(hosts)}, which one NVLink domain does not span"
        return None
    seen: dict[int, int] = {}
    for rank, place in enumerate(places):
        if place.device in seen:
            return (
                f"ranks {seen[place.device]} and {rank} both call their GPU cuda:{place.device} on host {place.host}; "
                "each needs one of its own, and a number for it that all agree on: let all see the same "
                "CUDA_VISIBLE_DEVICES"
            )
        seen[place.device] = rank
    for rank, place in enumerate(places):
        for other, device in enumerate(each.device for each in places):
            if device not in place.reaches:
                return (
                    f"rank {rank} (cuda:{place.device}) has no direct access to the memory of rank {other} "
                    f"(cuda:{device}) on host {place.host}"
                )
    return None


class _FabricInfo(ctypes.Structure):
    """``nvmlGpuFabricInfo_t`` of NVIDIA's management library."""

    _fields_ = [
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]
    COMPLETED = 3


def _nvlink_domain(device: int) -> str | None:
    """A name of the NVLink domain of several hosts that a GPU belongs to; ``None`` where there is none or no answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle, info = ctypes.c_void_p(), _FabricInfo()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
        if nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info)):
            return None
    except (OSError, AttributeError, RuntimeError):
        return None
    if info.state != _FabricInfo.COMPLETED or info.status or not any(info.cluster):
        return None
    return f"{bytes(info.cluster).hex()}/{info.clique}"
