"""When the compiled kernels serve and when their references do: a wrong answer here reads memory as what it is not."""

import ctypes
import shutil

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from olmoe_lightning.kernels import reference_kernels, rms_norm
from olmoe_lightning.kernels.choice import on_cpu
from olmoe_lightning.kernels.cpu import native

requires_native = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=f"no native kernels here: {native.unavailable_reason()}"
)


@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")
def test_a_machine_with_a_compiler_has_the_kernels_or_says_why_not():
    reason = native.unavailable_reason()
    assert reason is None or len(reason) > 20
    if reason is not None:
        with pytest.raises(native.Unavailable):
            native.library()


class Tagged(Tensor):
    """A subclass, as quantised or distributed tensors are: its memory is not what its type promises."""


@requires_native
def test_only_plain_fp32_tensors_on_the_cpu_are_served():
    plain = torch.ones(2, 3)
    assert on_cpu(plain)
    assert on_cpu(plain, None, torch.nn.Parameter(plain))
    for other in (plain.double(), plain.bfloat16(), plain.int(), plain.to("meta"), plain.as_subclass(Tagged)):
        assert not on_cpu(other)
        assert not on_cpu(plain, other)
    with FakeTensorMode():
        assert not on_cpu(torch.ones(2, 3))


@requires_native
def test_the_reference_can_be_asked_for_and_the_request_ends():
    plain = torch.ones(2)
    with reference_kernels():
        assert not on_cpu(plain)
        with reference_kernels():
            assert not on_cpu(plain)
        assert not on_cpu(plain)
    assert on_cpu(plain)
    with pytest.raises(ZeroDivisionError), reference_kernels():
        raise ZeroDivisionError
    assert on_cpu(plain)


@requires_native
def test_the_kernels_are_really_taken(monkeypatch):
    """Negative control for every comparison of the two: without a library, the call below cannot succeed."""

    class Refuses:
        def __getattr__(self, name: str) -> None:
            raise RuntimeError(f"native {name}")

    monkeypatch.setattr(native, "library", Refuses)
    with pytest.raises(RuntimeError, match="native rms_norm_forward"):
        rms_norm(torch.ones(2, 3), torch.ones(3), 1e-5)
    with reference_kernels():
        rms_norm(torch.ones(2, 3), torch.ones(3), 1e-5)


@requires_native
def test_loading_the_kernels_leaves_denormal_numbers_alone():
    """A library linked with -ffast-math would flush them to zero in the whole process."""
    native.library()
    tiny = torch.tensor([2.0**-140])
    assert (tiny * 0.5).item() == 2.0**-141
    assert ctypes.c_float(2.0**-149).value > 0


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(native.Unavailable, match=r"no C\+\+ compiler found; install g\+\+"):
        native._build()


def test_a_compiler_that_fails_is_quoted(tmp_path):
    broken = tmp_path / "broken.sh"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(native.Unavailable, match="this compiler is broken"):
        native._run([str(broken)])
