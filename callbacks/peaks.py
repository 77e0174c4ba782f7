"""What a device can do at most: dense matrix-product FLOP/s by device name and number format.

Vendors print the numbers of 2:4 structured sparsity, which are twice as high, next to or instead of the dense ones;
only dense numbers stand here. A device that is not listed gets no number: an MFU against the wrong peak is worse than
none.
"""

from __future__ import annotations

import functools
import re
import time
from dataclasses import dataclass
from typing import Literal

import torch

MatmulKind = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8"]


@dataclass(frozen=True)
class DevicePeak:
    """Dense peaks of one device in TFLOP/s; ``None`` where the device cannot, or the number is not certain.

    Args:
        name: words that must all be in the device's name, in capitals.
        half: FP16 and BF16 with FP32 accumulation (they are equal on everything listed).
        fp8: FP8 with FP32 accumulation.
        tf32: FP32 operands rounded to TF32.
        fp32: FP32 without tensor cores.
        native_mx: the device multiplies block-scaled MXFP8 itself. Elsewhere MXFP8 is emulated by BF16 products.
    """

    name: str
    half: float
    fp8: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    native_mx: bool = False

    def tflops(self, kind: MatmulKind) -> float | None:
        """The peak for one format in TFLOP/s."""
        by_kind = {"bf16": self.half, "fp16": self.half, "fp8": self.fp8, "tf32": self.tf32, "fp32": self.fp32}
        by_kind["mxfp8"] = self.fp8 if self.native_mx else self.half
        return by_kind.get(kind)


# The first row whose words are all in the name wins, so that a variant stands before its family.
PEAKS: tuple[DevicePeak, ...] = (
    DevicePeak("GB300", half=2500, fp8=5000, tf32=1250, native_mx=True),
    DevicePeak("GB200", half=2500, fp8=5000, tf32=1250, native_mx=True),
    DevicePeak("B300", half=2250, fp8=4500, tf32=1100, native_mx=True),
    DevicePeak("B200", half=2250, fp8=4500, tf32=1100, native_mx=True),
    DevicePeak("H200 NVL", half=835.5, fp8=1671, tf32=417.5, fp32=60),
    DevicePeak("H200", half=989.5, fp8=1979, tf32=494.5, fp32=67),
    DevicePeak("GH200", half=989.5, fp8=1979, tf32=494.5, fp32=67),
    DevicePeak("H100 NVL", half=835.5, fp8=1671, tf32=417.5, fp32=60),
    DevicePeak("H100 PCIE", half=756.5, fp8=1513, tf32=378, fp32=51),
    DevicePeak("H100", half=989.5, fp8=1979, tf32=494.5, fp32=67),
    DevicePeak("H800 PCIE", half=756.5, fp8=1513, tf32=378, fp32=51),
    DevicePeak("H800", half=989.5, fp8=1979, tf32=494.5, fp32=67),
    DevicePeak("H20", half=148, fp8=296, tf32=74, fp32=44),
    DevicePeak("A100", half=312, tf32=156, fp32=19.5),
    DevicePeak("A800", half=312, tf32=156, fp32=19.5),
    DevicePeak("A30", half=165, tf32=82, fp32=10.3),
    DevicePeak("A10", half=125, tf32=62.5, fp32=31.2),
    DevicePeak("L40S", half=362, fp8=733, tf32=183, fp32=91.6),
    DevicePeak("L40", half=181, fp8=362, tf32=90.5, fp32=90.5),
    DevicePeak("L4", half=121, fp8=242.5, tf32=60, fp32=30.3),
    DevicePeak("RTX PRO 6000", half=503.8, fp8=1007.6, native_mx=True),
    # GeForce cards halve their rate when they accumulate in FP32, as training does.
    DevicePeak("RTX 5090", half=209.5, fp8=419, tf32=104.8, fp32=104.8, native_mx=True),
    DevicePeak("RTX 4090", half=165.2, fp8=330.3, tf32=82.6, fp32=82.6),
    DevicePeak("MI300X", half=1307.4, fp8=2614.9, tf32=653.7, fp32=163.4),
)

# A slice of a card (MIG, vGPU) and the slower namesakes of a card must not get the whole card's number.
_NOT_THE_CARD = frozenset({"MIG", "GRID", "LAPTOP", "MAX", "D", "TI"})

_CPU_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    # There are no FP8 products on a CPU: the emulation multiplies in BF16.
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "mxfp8": torch.bfloat16,
}
_CPU_BUDGET_S = 0.8


def find_device_peak(device_name: str) -> DevicePeak | None:
    """The table's row for a device's name as the driver reports it, or ``None``.

    Whole words are compared: ``NVIDIA H200`` is found, and neither ``H20`` nor ``A10`` is found in ``H200`` or
    ``A100``.
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    if words & _NOT_THE_CARD:
        return None
    return next((peak for peak in PEAKS if set(peak.name.split()) <= words), None)


def matmul_kind(precision: str, device: torch.device) -> MatmulKind:
    """The number format in which most matrix products run.

    Args:
        precision: ``trainer.precision``, for example ``32-true``, ``bf16-mixed``, ``16-true``, ``mxfp8``,
            ``transformer-engine``.
        device: decides whether ``32-true`` means TF32 (CUDA with TF32 allowed).
    """
    name = precision.lower()
    if "mxfp8" in name:
        return "mxfp8"
    if "fp8" in name or name.startswith("transformer-engine"):
        return "fp8"
    if "bf16" in name or "bfloat16" in name:
        return "bf16"
    if "64" in name:
        return "fp64"
    if "16" in name:
        return "fp16"
    return "tf32" if device.type == "cuda" and _tf32_allowed() else "fp32"


def peak_flops(device: torch.device, kind: MatmulKind) -> float | None:
    """Dense peak of one device in FLOP/s.

    A CUDA or ROCm device is looked up by name. A CPU is measured, once per process, format and number of threads, with
    square matrix products of a few sizes; that takes less than a second and draws no random numbers.

    Args:
        device: the device of this rank.
        kind: the number format of the products, see :func:`matmul_kind`.

    Returns:
        FLOP/s, or ``None`` for a device or format that is not in the table.
    """
    if device.type == "cpu":
        return _measured_cpu_flops(_CPU_DTYPES[kind], torch.get_num_threads())
    if device.type != "cuda":
        return None
    peak = find_device_peak(torch.cuda.get_device_name(device))
    tflops = peak.tflops(kind) if peak is not None else None
    return None if tflops is None else tflops * 1e12


def _tf32_allowed() -> bool:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the per-backend switch was used, and the old one refuses to be read beside it
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@functools.cache
def _measured_cpu_flops(dtype: torch.dtype, threads: int) -> float:
    """Best rate over sizes and repetitions; ``threads`` is there because the result holds for that number only."""
    deadline = time.perf_counter() + _CPU_BUDGET_S
    best = 0.0
    with torch.inference_mode():
        for size in (256, 512, 1024, 2048):
            work = 2.0 * size**3
            # A slow format (BF16 without hardware support) stops at the small sizes; three runs must fit.
            if best and time.perf_counter() + 3 * work / best > deadline:
                break
            matrix = torch.full((size, size), 0.5, dtype=dtype)
            result = matrix @ matrix
            for _ in range(12):
                start = time.perf_counter()
                torch.mm(matrix, matrix, out=result)
                end = time.perf_counter()
                best = max(best, work / (end - start))
                if end + work / best > deadline:
                    break
    return best
