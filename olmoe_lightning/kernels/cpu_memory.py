"""Memory of the CPU between steps."""

from __future__ import annotations

import ctypes
import functools
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@functools.cache
def keep_freed_memory() -> bool:
    """Let the C library keep what a step frees for the next step, instead of returning it to the system each time.

    Large tensors are otherwise mapped afresh in every step, and the system clears each page at its first touch: with
    100 M parameters that took a fifth of the time. The process then holds on to its peak memory. Does nothing where the
    C library is not glibc.

    Returns:
        Whether the setting took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))  # as unsigned: no limit
