"""The compiled kernels and their references answer to the same tests."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from olmoe_lightning.kernels import reference_kernels


@pytest.fixture(params=["native", "native_two_threads", "reference"])
def kernels(request) -> Iterator[None]:
    """A test that uses this runs on the compiled kernels with one and two threads, and on the PyTorch reference."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if request.param == "native_two_threads" else 1)
    with reference_kernels() if request.param == "reference" else contextlib.nullcontext():
        yield
    torch.set_num_threads(before)
