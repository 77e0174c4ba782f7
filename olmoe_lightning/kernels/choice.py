"""The only place that decides which implementation serves operands: C++ on CPUs, Triton on GPUs, or PyTorch.

Plain tensors take the compiled kernels where these can run. What is traced, fake or elsewhere takes PyTorch, and so do
all operands inside ``reference_kernels()``.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from olmoe_lightning.kernels.cpu.native import unavailable_reason

ROWS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of the rows that the Triton kernels move and add. Halves are added in fp32 and rounded once."""

_reference_only = contextvars.ContextVar("olmoe_lightning_reference_kernels", default=False)
_interpreted = contextvars.ContextVar("olmoe_lightning_interpreted_kernels", default=False)


@contextlib.contextmanager
def reference_kernels() -> Iterator[None]:
    """Inside, every operation takes its PyTorch reference: to compare the two, or to count operations."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def on_cpu(*tensors: Tensor | None, dtypes: Collection[torch.dtype] = (torch.float32,)) -> bool:
    """Whether the C++ kernels may serve these operands: all of them plain tensors of the CPU.

    Args:
        tensors: ``None`` for an operand that is not there.
        dtypes: that this kernel takes.
    """
    if torch.compiler.is_compiling() or _reference_only.get():
        return False
    for tensor in tensors:
        if tensor is not None and not (_plain(tensor) and tensor.is_cpu and tensor.dtype in dtypes):
            return False
    return unavailable_reason() is None


def on_gpu(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels may serve these operands: all of them plain tensors of the current CUDA device.

    Args:
        tensors: ``None`` for an operand that is not there.
    """
    if torch.compiler.is_compiling() or _reference_only.get() or triton_missing() is not None:
        return False
    return all(tensor is None or (_plain(tensor) and _on_current_device(tensor)) for tensor in tensors)


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)  # subclasses are fake, quantised or distributed


def _on_current_device(tensor: Tensor) -> bool:
    if _interpreted.get():
        return tensor.device.type == "cpu"
    # Triton starts kernels on the current device, whatever its operands are.
    return tensor.device.type == "cuda" and tensor.device.index == torch.cuda.current_device()


@functools.cache
def triton_missing() -> str | None:
    """Why there are no Triton kernels here; ``None`` when they can be imported."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it exists for Linux: pip install triton"
    return None


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Inside, CPU tensors take the Triton kernels, in Triton's interpreter: to test them without a GPU.

    Triton has to be imported with ``TRITON_INTERPRET=1`` in the environment. Its interpreter runs one kernel at a time:
    threads must run one after the other. A thread that is started inside is outside again.

    Raises:
        RuntimeError: Triton was imported to compile.
    """
    from triton import language, runtime

    if isinstance(language.sum, runtime.JITFunction):
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1: its kernels take CUDA tensors only")
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)
