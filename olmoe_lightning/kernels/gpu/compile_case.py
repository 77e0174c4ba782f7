"""One way in which a Triton kernel is compiled in real runs, as a plain record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """What a compiler must know to build a kernel without tensors, and what the result must look like.

    Args:
        name: unique over the package, e.g. ``"permute bf16 D2048"``.
        kernel: the function that ``@triton.jit`` made.
        types: Triton's type of arguments: ``"*fp32"``, ``"*bf16"``, ``"*i64"``, ``"fp32"``; those that are not named
            are ``"i32"``.
        constants: values of the arguments that are compiled in.
        unaligned: arguments of which nothing is known. All others are multiples of 16, as addresses and widths are.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        tensor_core: its products must run on tensor cores; without it no such instruction may appear.
        architectures: 10 times the compute capabilities that it is meant for.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    unaligned: Collection[str] = ()
    num_warps: int = 4
    num_stages: int = 2
    tensor_core: bool = False
    architectures: tuple[int, ...] = (80, 90, 100)

    @property
    def signature(self) -> dict[str, str]:
        """The type of every argument, as ``triton.compiler.ASTSource`` takes it."""
        types = self.types | dict.fromkeys(self.constants, "constexpr")
        return {name: types.get(name, "i32") for name in self.kernel.arg_names}

    @property
    def attrs(self) -> dict[Any, Any]:
        """What is known of the arguments, by their number, as ``triton.compiler.ASTSource`` takes it."""
        known = {name for name, kind in self.signature.items() if kind != "constexpr"} - set(self.unaligned)
        return {(i,): [["tt.divisibility", 16]] for i, name in enumerate(self.kernel.arg_names) if name in known}
