"""The Triton kernels run here in Triton's interpreter, on CPU tensors.

``tests/conftest.py`` has set ``TRITON_INTERPRET`` before anything could import Triton. Child processes that compile
kernels must not inherit it: they are started with ``compiling_environment``.
"""

import os
from importlib.util import find_spec

import pytest

# There is no Triton for macOS.
collect_ignore_glob = ["test_*.py"] if find_spec("triton") is None else []


@pytest.fixture(scope="session")
def compiling_environment() -> dict[str, str]:
    """The environment for a child process in which kernels are compiled, not interpreted."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
