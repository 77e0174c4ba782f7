"""What else the machine is doing, and which settings the measured processes inherit."""

from __future__ import annotations

import os
import platform
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Read by the OpenMP and BLAS runtimes and by the allocator when a process starts.
_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "TORCH", "ATEN_")


def inherited_settings() -> dict[str, str]:
    """Environment variables that change how fast the measured processes run; all of them inherit the same."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def describe() -> dict[str, object]:
    """Processor, cores and the versions that matter."""
    versions = {}
    for package in ("torch", "lightning", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"cpu": _cpu_name(), "cores": cores(), "python": platform.python_version(), **versions}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Of the last minute; it lags, and counts what this machine itself ran before."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, or ``None`` where the system does not say (other than Linux)."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


class LoadWatch:
    """How many cores other processes, and other tenants of the host, took since construction (Linux only)."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._system = _system_seconds()
        self._own = _own_seconds()

    def others(self) -> dict[str, float | None]:
        """Mean number of cores.

        Returns:
            ``others``: busy for processes that are neither this one nor its children that have ended. ``steal``: taken
            away by the hypervisor. ``None`` where the system does not say.
        """
        now = _system_seconds()
        if self._system is None or now is None:
            return {"others": None, "steal": None}
        wall = time.perf_counter() - self._wall
        busy, steal = now[0] - self._system[0], now[1] - self._system[1]
        # The kernel counts in ticks of 10 ms, so a short watch may come out slightly below zero.
        return {"others": max(0.0, busy - _own_seconds() + self._own) / wall, "steal": steal / wall}


def busy_warning(load: float | None, others: float | None) -> str | None:
    """One line if figures from this machine would mean little now, else ``None``.

    Args:
        load: the load average.
        others: cores that other processes keep busy at this moment.
    """
    limit = 0.5 * cores()
    if others is not None and others > limit / 2:
        return f"other processes keep {others:.1f} of {cores()} cores busy; figures will be low and unsteady"
    if load is not None and load > limit:
        return (
            f"the load average is {load:.2f} on {cores()} cores (above {limit:g}); unless that is the echo of an "
            "earlier run of your own, figures will be low and unsteady"
        )
    return None


def _own_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _system_seconds() -> tuple[float, float] | None:
    """CPU seconds since boot, over all cores: busy for somebody on this system, and stolen from it."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    ticks = [float(field) / os.sysconf("SC_CLK_TCK") for field in line.split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
    return user + nice + system + irq + softirq, steal


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
