"""The CPU kernels in C++: compiled once with the machine's compiler, loaded with ctypes, and never required.

They work on dense tensors in memory. Where they cannot run (no compiler, another BLAS) the operations take their
PyTorch reference instead, which gives the same numbers up to rounding.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCES = Path(__file__).parent

_COMPILE = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffast-math", "-fno-finite-math-only"]
_VECTOR = {
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    "AVX2": ["-mavx2", "-mfma"],
}
_C_TYPES: dict[type, Any] = {bool: ctypes.c_int, int: ctypes.c_int64, float: ctypes.c_float}


class Unavailable(RuntimeError):
    """Why the kernels cannot run here."""


@functools.cache
def _load() -> ctypes.CDLL | Unavailable:
    try:
        return _build()
    except (Unavailable, OSError, AttributeError, subprocess.SubprocessError) as error:
        return Unavailable(str(error))


def unavailable_reason() -> str | None:
    """``None`` when the kernels run here, else why not; compiles them at the first call (a second or two)."""
    loaded = _load()
    return str(loaded) if isinstance(loaded, Unavailable) else None


def library() -> ctypes.CDLL:
    """The kernels.

    Raises:
        Unavailable: they cannot run here.
    """
    loaded = _load()
    if isinstance(loaded, Unavailable):
        raise loaded
    return loaded


def call(name: str, *operands: Tensor | Sequence[Tensor] | float | ctypes.c_int | None) -> None:
    """Run a kernel.

    Args:
        name: of the C function.
        operands: in its order. A tensor is the address of its first element, null for ``None``; several are an array of
            addresses; bool is an int, int an int64_t, float a float. :func:`threads` most often is the last.
    """
    getattr(library(), name)(*map(_operand, operands))


def threads() -> ctypes.c_int:
    """How many threads a kernel may use."""
    return ctypes.c_int(torch.get_num_threads())


def _operand(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if c_type := _C_TYPES.get(type(value)):
        return c_type(value)
    if value is None or isinstance(value, ctypes.c_int):
        return value  # ctypes passes None as a null pointer
    return (ctypes.c_void_p * len(value))(*(tensor.data_ptr() for tensor in value))


def _build() -> ctypes.CDLL:
    torch_lib = Path(torch.__file__).parent / "lib"
    if not (torch_lib / "libtorch_cpu.so").exists():
        raise Unavailable(f"no libtorch_cpu.so in {torch_lib}; the kernels are built on Linux only")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Unavailable("no C++ compiler found; install g++ to get the faster CPU kernels")
    capability = torch.backends.cpu.get_cpu_capability()
    flags = [*_COMPILE, *_VECTOR.get(capability, [])]
    sources = sorted(_SOURCES.glob("*.cpp"))
    key = hashlib.blake2b(digest_size=10)
    for part in (torch.__version__, str(torch_lib), compiler, *flags):
        key.update(part.encode())
    for source in [*sources, *sorted(_SOURCES.glob("*.h"))]:
        key.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "olmoe-lightning" / "kernels"
    target = cache / f"{key.hexdigest()}.so"
    if not target.exists():
        _compile(compiler, flags, sources, torch_lib, target)
    kernels = ctypes.CDLL(str(target))
    _check_one_openmp()
    kernels.rms_norm_forward  # noqa: B018  # a library without it is not ours
    return kernels


def _compile(compiler: str, flags: list[str], sources: list[Path], torch_lib: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for source in sources:
            objects.append(f"{folder}/{source.stem}.o")
            _run([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        # Linked apart and without -ffast-math, which would make loading the library switch off denormal numbers in
        # the whole process. The BLAS and OpenMP are torch's own, so that there is one pool of threads.
        output = f"{folder}/{target.name}"
        _run([compiler, "-shared", "-fopenmp", *objects, "-o", output, f"-L{torch_lib}", "-ltorch_cpu",
              f"-Wl,-rpath,{torch_lib}"])  # fmt: skip
        os.replace(output, target)  # whole or not at all, also when several processes build at once


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Unavailable(f"the compiler failed: {' '.join(command)}\n{done.stderr.strip()[-2000:]}")


def _check_one_openmp() -> None:
    """Two OpenMP runtimes would keep two pools of spinning threads on the same cores."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "omp" in line}
    except OSError:
        return
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    if len(runtimes) > 1:
        raise Unavailable(f"two OpenMP runtimes would be loaded: {', '.join(sorted(runtimes))}")
