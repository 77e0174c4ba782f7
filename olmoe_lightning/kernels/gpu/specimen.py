"""One way in which a Triton kernel is compiled in real runs, as a plain record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Specimen:
    """What a compiler must know to build a kernel without tensors, and what the result must look like.

    Args:
        name: unique over the package, e.g. ``"permute bf16 D2048"``.
        kernel: the function that ``@triton.jit`` made.
        signature: Triton's type of every argument: ``"*fp32"``, ``"*bf16"``, ``"*i32"``, ``"*i64"``, ``"i32"``,
            ``"i64"``, ``"fp32"``; ``"constexpr"`` for those in ``constants``.
        constants: values of the arguments that are compiled in.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        tensor_core: its products must run on tensor cores; without it no such instruction may appear.
        attrs: what is known of arguments, as ``triton.compiler.ASTSource`` takes it:
            ``{(index,): [["tt.divisibility", 16]]}``.
        architectures: 10 times the compute capabilities that it is meant for.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    tensor_core: bool = False
    attrs: dict[Any, Any] | None = None
    architectures: tuple[int, ...] = (80, 90, 100)
