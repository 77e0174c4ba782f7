"""Compile every Triton kernel for GPUs that need not be there, and say what the compiler made of it.

    python -m olmoe_lightning.kernels.gpu.compile            # a table; make kernels
    python -m olmoe_lightning.kernels.gpu.compile --json     # one line

Registers and stack come from the binary's table of resources, read with a program that Triton brings along.
Instructions are counted in PTX, as they stand there: a loop counts once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import olmoe_lightning.kernels.gpu as package
from olmoe_lightning.kernels.gpu.compile_case import CompileCase

SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program may have. SM 8.0 would give 163 KiB, but its kernels run on 8.6 and 8.9 too."""

TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""The PTX instruction by which each architecture multiplies matrices at full rate."""

_COUNTED = {
    "loads": r"ld\.(?:volatile\.)?global|cp\.async\.c[ag]|cp\.async\.bulk\.tensor\S+\.shared::cluster\.global",
    "stores": r"st\.global|cp\.async\.bulk\.tensor\S+\.global\.shared::cta",
    "shared": r"(?:ld|st)\.(?:volatile\.)?shared|ldmatrix|stmatrix",
    "barriers": r"bar\.sync|barrier\.sync|mbarrier\.try_wait",
    "tensor": r"mma\.sync|wgmma\.mma_async|tcgen05\.mma",
}
"""Kinds of PTX instructions."""


class Unavailable(RuntimeError):
    """Why kernels cannot be compiled here."""


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of a case.

    Args:
        name: of the case.
        sm: architecture, e.g. 90.
        registers: of each thread.
        stack_bytes: of each thread, in slow memory: registers that were spilled. Kernels have no arrays of their own.
        shared_bytes: of each program.
        tensor_core: PTX names of the tensor-core instructions in it, joined by ``+``; empty without any.
        instructions: how many of each kind: ``loads`` and ``stores`` of global memory, accesses to ``shared`` memory,
            ``barriers``, ``tensor`` cores, and ``all``.
        seconds: that it took.
    """

    name: str
    sm: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_core: str
    instructions: dict[str, int]
    seconds: float


def unavailable_reason() -> str | None:
    """``None`` where kernels can be compiled, else why not."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); it exists for Linux: pip install triton"
    # Not the variable itself: Triton read it when its own functions were decorated.
    if not isinstance(triton.language.sum, triton.runtime.JITFunction):
        return "Triton was imported with TRITON_INTERPRET set, so kernels are interpreted, not compiled; unset it"
    return None


def kernel_modules() -> list[ModuleType]:
    """All modules of the package that define kernels, imported; they need Triton."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    own = [name for name in names if name not in ("compile", "compile_case")]
    return [importlib.import_module(f"{package.__name__}.{name}") for name in own]


def collect() -> list[CompileCase]:
    """The cases of all modules.

    Raises:
        ImportError: there is no Triton.
        ValueError: two have the same name.
    """
    cases = [case for module in kernel_modules() for case in module.COMPILE_CASES]
    twice = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    if twice:
        raise ValueError(f"names of cases must be unique, but there are several of {', '.join(map(repr, twice))}")
    return cases


def compile_case(case: CompileCase, sm: int) -> Compiled:
    """Compile one for one architecture; about a second.

    Args:
        case: what to compile.
        sm: 10 times the compute capability, e.g. 80.

    Raises:
        Unavailable: kernels cannot be compiled here.
    """
    if reason := unavailable_reason():
        raise Unavailable(reason)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    start = time.perf_counter()
    source = ASTSource(case.kernel, case.signature, case.constants, case.attrs)
    # Fusion is Triton's default; newer versions warn where it is not chosen.
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    registers, stack = _resources(built.asm["cubin"])
    ptx, shared = built.asm["ptx"], int(built.metadata.shared)
    # Not a part of a longer name: wgmma.mma_async holds no mma.sync, but it might.
    tensor_core = "+".join(name for name in TENSOR_CORE.values() if re.search(rf"(?<![\w.]){re.escape(name)}\b", ptx))
    seconds = time.perf_counter() - start
    return Compiled(case.name, sm, registers, stack, shared, tensor_core, _count(ptx), seconds)


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of the kernel in a binary."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        usage = _tool("cuobjdump", "-res-usage", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise Unavailable(f"cuobjdump -res-usage prints another form than is known here: {usage.strip()[-300:]!r}")
    return int(found[1]), int(found[2])


def _count(ptx: str) -> dict[str, int]:
    # One instruction a line, behind a predicate perhaps: @%p1 st.global.v4.b32 ...
    body = re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)[^\n]*;", ptx, re.MULTILINE)
    counts = {kind: sum(re.match(pattern, name) is not None for name in body) for kind, pattern in _COUNTED.items()}
    return {**counts, "all": len(body)}


def _tool(name: str, *arguments: str) -> str:
    """Output of one of the programs that come with Triton or with CUDA."""
    import triton

    shipped = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    path = str(shipped) if shipped.exists() else shutil.which(name)
    if path is None:
        raise Unavailable(f"{name} is neither in {shipped.parent} nor in PATH")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise Unavailable(f"{name} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def table(compiled: Sequence[Compiled]) -> str:
    """One line for each, aligned."""
    kinds = ("loads", "stores", "shared", "barriers", "all")
    rows: list[tuple[Any, ...]] = [("kernel", "SM", "registers", "stack B", "shared B", "tensor core", *kinds)]
    for each in compiled:
        numbers = (each.registers, each.stack_bytes, each.shared_bytes, each.tensor_core or "-")
        rows.append((each.name, each.sm, *numbers, *(each.instructions[kind] for kind in kinds)))
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    # Names to the left, numbers to the right.
    aligned = [
        "  ".join(
            str(cell).ljust(width) if column in (0, 5) else str(cell).rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(aligned)


def main(arguments: list[str] | None = None) -> int:
    """Compile and print.

    Returns:
        The exit status: 1 if a kernel spills registers, takes too much shared memory, or has tensor-core instructions
        that it should not have or lacks those it should; 2 if kernels cannot be compiled here.
    """
    parser = argparse.ArgumentParser(description="What the compiler makes of the Triton kernels; no GPU is needed.")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    parser.add_argument("--sm", type=int, nargs="+", default=sorted(TENSOR_CORE), choices=sorted(TENSOR_CORE))
    parser.add_argument("--only", default="", help="part of a name: compile only what has it")
    args = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        if reason := unavailable_reason():
            raise Unavailable(reason)
        chosen = [each for each in collect() if args.only in each.name]
        jobs = [(case, sm) for case in chosen for sm in args.sm if sm in case.architectures]
        compiled = [compile_case(*job) for job in jobs]
    except Unavailable as error:
        print(f"kernels cannot be compiled here: {error}", file=sys.stderr)
        return 2
    faults = [fault for (case, _), each in zip(jobs, compiled, strict=True) for fault in _faults(case, each)]
    if args.json:
        print(json.dumps({"kernels": [asdict(each) for each in compiled], "faults": faults}))
    else:
        print(table(compiled))
        seconds = time.perf_counter() - start
        print(f"\n{len(compiled)} kernels of {len(chosen)} kinds in {seconds:.0f} s; no GPU was used")
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _faults(case: CompileCase, compiled: Compiled) -> list[str]:
    name, sm = compiled.name, compiled.sm
    wanted = TENSOR_CORE[sm] if case.tensor_core else ""
    faults = []
    if compiled.tensor_core != wanted:
        found = compiled.tensor_core or "none"
        faults.append(f"{name} for SM {sm} should have the tensor-core instruction {wanted or 'none'}, has {found}")
    if compiled.stack_bytes:
        faults.append(f"{name} for SM {sm} spills: {compiled.stack_bytes} bytes of stack, as registers do not suffice")
    if compiled.shared_bytes > SHARED_LIMIT[sm]:
        faults.append(
            f"{name} for SM {sm} takes {compiled.shared_bytes} bytes of shared memory, there are {SHARED_LIMIT[sm]}"
        )
    return faults


if __name__ == "__main__":
    sys.exit(main())
