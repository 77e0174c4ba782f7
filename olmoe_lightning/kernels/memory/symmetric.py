"""Memory of the same size on every process of a group, which all of them read and write: the interface.

Its kinds: of processes of one host (``posix``), of GPUs with peer access (``cuda``), and of virtual ranks inside one
process (``virtual``), for tests and for a group of one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MAX_NUMBERS = 8
"""How many integers one exchange carries."""


class PeerError(RuntimeError):
    """A process of the group did not come; the message names it."""


class Region(ABC):
    """So many bytes on every process."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @abstractmethod
    def storage(self, rank: int, on_release: Callable[[], None] | None = None) -> Tensor:
        """All bytes of a process' part, uint8 [nbytes], as a tensor with a storage of its own.

        Args:
            rank: of the process.
            on_release: called when the last tensor of this storage is gone.
        """

    def peer(self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A part of a process' memory as a tensor.

        Args:
            rank: of the process in the group; one's own too.
            shape: of the tensor.
            dtype: of its values.
            offset: bytes from the beginning, a multiple of the size of a value.

        Raises:
            ValueError: it does not lie inside the region.
        """
        return carve(self.storage(rank), shape, dtype, offset)


class SymmetricMemory(ABC):
    """The processes of a group and what they share.

    Every process calls ``allocate`` and ``exchange`` in the same order.
    """

    rank: int
    size: int

    @abstractmethod
    def allocate(self, nbytes: int) -> Region:
        """A new region; collective. It lives until no process has a tensor of it.

        Memory is taken page by page when it is first written, where the system allows it.
        """

    @abstractmethod
    def exchange(self, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Host numbers of every process, by rank; and a barrier for what was written to the regions before.

        No tensor is read: what is exchanged here is known on the host anyway, such as the shape of a tensor.

        Args:
            numbers: at most 8, equally many on every process.

        Raises:
            PeerError: a process did not come in time, or has ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what does not belong to a region; calling it again does nothing."""


def carve(storage: Tensor, shape: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
    """A tensor over a part of a storage of bytes.

    Raises:
        ValueError: it does not fit.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if offset < 0 or offset + size > len(storage) or offset % dtype.itemsize:
        raise ValueError(
            f"a tensor {list(shape)} of {dtype} at byte {offset} takes {size} bytes and does not lie inside a region "
            f"of {len(storage)} bytes, or is not aligned to {dtype.itemsize}"
        )
    return storage[offset : offset + size].view(dtype).view(list(shape))
