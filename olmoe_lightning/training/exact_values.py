"""fp32 values of parameters and buffers that a precision plugin narrows for a run: they come back when it ends."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch import Tensor, nn

from olmoe_lightning.parallel.buffers import adopted


class ExactValues:
    """Of what no optimizer keeps masters of: all tensors of an evaluation; what is frozen, and buffers, of a fit."""

    def __init__(self) -> None:
        self._parameters: dict[nn.Parameter, Tensor | None] = {}
        self._buffers: dict[str, Tensor | None] = {}

    @contextmanager
    def narrowing(self, module: nn.Module) -> Generator[None, None, None]:
        """Inside, tensors of the module are narrowed in place."""
        parameters = {parameter: parameter.data for parameter in module.parameters()}
        buffers = dict(module.named_buffers(remove_duplicate=False))
        try:
            yield
        finally:
            self._parameters = {p: value for p, value in parameters.items() if p.dtype != value.dtype}
            now = dict(module.named_buffers(remove_duplicate=False))
            self._buffers = {name: value for name, value in buffers.items() if now[name].dtype != value.dtype}

    @contextmanager
    def handing_over(self, trained: Iterable[nn.Parameter]) -> Generator[dict[nn.Parameter, Tensor], None, None]:
        """The values of parameters that get masters inside, which keep them from then on; unless an error comes."""
        found = {parameter: self._parameters.pop(parameter, None) for parameter in trained}
        values = {parameter: value for parameter, value in found.items() if value is not None}
        try:
            yield dict(values)
        except BaseException:
            self._parameters |= values
            raise

    def keep_on_host(self) -> None:
        """Move what is left to where it takes no memory of the device."""
        self._parameters = {parameter: _on_host(value) for parameter, value in self._parameters.items()}
        self._buffers = {name: _on_host(value) for name, value in self._buffers.items()}

    def forget_values(self) -> None:
        """A checkpoint has replaced them all."""
        self._parameters = dict.fromkeys(self._parameters)
        self._buffers = dict.fromkeys(self._buffers)

    def close(self, module: nn.Module | None, restore: bool) -> None:
        """The run is over.

        Args:
            module: whose tensors they are.
            restore: make them fp32 again, with the exact values where nothing else was set.
        """
        if restore and module is not None:
            for parameter, exact in self._parameters.items():
                parameter.data = _widened(parameter.data, exact)
            now = dict(module.named_buffers(remove_duplicate=False))
            for name, exact in self._buffers.items():
                owner, _, own_name = name.rpartition(".")
                setattr(module.get_submodule(owner), own_name, _widened(now[name], exact))
        self._parameters, self._buffers = {}, {}


def _on_host(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.cpu()


def _widened(value: Tensor, exact: Tensor | None) -> Tensor:
    if exact is None or exact.shape != value.shape:
        return value.float()
    return adopted(value, exact.to(value.device))
