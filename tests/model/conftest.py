"""The network is the same whether the compiled kernels or their references compute it."""

import contextlib
from collections.abc import Iterator

import pytest

from olmoe_lightning.kernels import reference_kernels


@pytest.fixture(params=["native", "reference"])
def kernels(request) -> Iterator[None]:
    """A test that uses this runs on the compiled kernels and on the PyTorch reference."""
    with reference_kernels() if request.param == "reference" else contextlib.nullcontext():
        yield
