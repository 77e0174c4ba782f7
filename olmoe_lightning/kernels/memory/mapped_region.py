"""A region of symmetric memory that is mapped into the address space of one process or of several."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from olmoe_lightning.kernels.memory.symmetric import Region


class MappedRegion(Region):
    """One mapping per process of the group.

    Args:
        maps: by rank.
        nbytes: of each.
    """

    def __init__(self, maps: Sequence[mmap.mmap], nbytes: int) -> None:
        super().__init__(nbytes)
        self._maps = maps
        for each in maps:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # advice
                    each.madvise(mmap.MADV_HUGEPAGE)

    @override
    def storage(self, rank: int, on_release: Callable[[], None] | None = None) -> Tensor:
        """All bytes of a process' part.

        Args:
            rank: of the process.
            on_release: called when the last tensor of this storage is gone.
        """
        view = (ctypes.c_char * self.nbytes).from_buffer(self._maps[rank])
        if on_release is not None:
            # The storage of a tensor that is made from a buffer keeps the buffer's owner, and nothing else does.
            weakref.finalize(view, on_release).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)
