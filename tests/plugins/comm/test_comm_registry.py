"""A name becomes the plugin that was asked for, or an error with the reason and what to take instead."""

import sys

import pytest
import torch

from olmoe_lightning.plugins import AllToAllComm, CommPlugin, LocalComm, RowwiseComm
from olmoe_lightning.plugins.comm import describe_choice, known_names, make_comm

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """A distribution that registers a good plugin, a module that cannot be imported, and something else."""
    (tmp_path / "fast_comm.py").write_text(
        "from olmoe_lightning.plugins import LocalComm\n"
        "class FastComm(LocalComm):\n"
        "    name = 'fast'\n"
        "    @classmethod\n"
        "    def unavailable(cls, axis_size, device):\n"
        "        return None if device.type == 'cpu' else 'the wire is for CPUs'\n"
        "no_plugin = 3\n"
    )
    (tmp_path / "broken_comm.py").write_text("import a_library_that_is_not_there\n")
    info = tmp_path / "fast_comm-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fast-comm\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(
        "[olmoe_lightning.comm]\n"
        "fast = fast_comm:FastComm\n"
        "broken = broken_comm:Comm\n"
        "three = fast_comm:no_plugin\n"
        "local = fast_comm:FastComm\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("fast_comm", None)


def test_names_give_their_plugins():
    assert type(make_comm("local", 1, CPU)) is LocalComm
    assert type(make_comm("all_to_all", 2, CPU)) is AllToAllComm
    assert type(make_comm("all_to_all", 1, CPU)) is AllToAllComm
    assert type(make_comm("rowwise", 2, CPU)) is RowwiseComm


@pytest.mark.parametrize(
    ("size", "plugin", "reason"),
    [
        (1, LocalComm, "'local': all experts are in one process"),
        (4, AllToAllComm, "'all_to_all': the experts are shared by 4 processes, which speak over gloo"),
    ],
)
def test_auto_says_what_it_chose_and_why(size, plugin, reason):
    assert type(make_comm("auto", size, CPU)) is plugin
    assert describe_choice("auto", size, CPU) == f"comm 'auto' chose {reason}"
    assert describe_choice("local", 1, CPU) == describe_choice(LocalComm(), 1, CPU) == "comm 'local', as asked for"


def test_an_instance_is_taken_as_it_is():
    comm = LocalComm()
    assert make_comm(comm, 1, CPU) is comm


@pytest.mark.parametrize("comm", ["local", LocalComm()])
def test_a_plugin_that_cannot_serve_is_an_error_with_the_alternative_and_never_replaced(comm):
    with pytest.raises(ValueError) as caught:
        make_comm(comm, 2, CPU)
    assert str(caught.value) == (
        "comm 'local' cannot be used here: it reaches only experts of its own process, but 2 processes share them; "
        "take 'all_to_all' (the experts are shared by 2 processes, which speak over gloo)"
    )


def test_all_to_all_needs_a_device_it_has_a_network_for():
    with pytest.raises(ValueError, match=r"no all-to-all for devices of type 'mps', only for cpu \(gloo\) and cuda"):
        make_comm("all_to_all", 2, MPS)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_all_to_all_needs_nccl_on_cuda():
    with pytest.raises(ValueError, match="this build of torch has no NCCL"):
        make_comm("all_to_all", 2, CUDA)


def test_plugins_of_later_versions_are_known_by_name():
    with pytest.raises(ValueError, match="comm 'deepep' is not part of this version yet; take 'all_to_all'"):
        make_comm("deepep", 2, CPU)


def test_rowwise_says_what_it_cannot_serve():
    with pytest.raises(ValueError, match="comm 'rowwise' cannot be used here: its kernels for devices of type 'mps'"):
        make_comm("rowwise", 2, MPS)


def test_an_unknown_name_lists_the_known_ones_closest_first():
    with pytest.raises(ValueError) as caught:
        make_comm("alltoall", 2, CPU)
    text = str(caught.value)
    assert text.startswith("unknown comm 'alltoall'; known are 'all_to_all', ")
    assert all(repr(name) in text for name in known_names())


@pytest.mark.parametrize("comm", [None, 3, ["local"]])
def test_what_is_neither_name_nor_plugin_is_a_type_error(comm):
    with pytest.raises(TypeError, match=r"comm must be a name \(auto, local, all_to_all"):
        make_comm(comm, 1, CPU)


def test_a_class_is_not_an_instance():
    with pytest.raises(TypeError, match=r"give an instance, LocalComm\(\.\.\.\)"):
        make_comm(LocalComm, 1, CPU)


def test_other_packages_register_plugins(other_package):
    assert known_names() == ["auto", "local", "all_to_all", "rowwise", "broken", "fast", "three"]
    assert "fast_comm" not in sys.modules  # to know a name is not to import its module
    comm = make_comm("fast", 1, CPU)
    assert isinstance(comm, CommPlugin)
    assert comm.name == "fast"
    with pytest.raises(ValueError, match="comm 'fast' cannot be used here: the wire is for CPUs; take 'local'"):
        make_comm("fast", 1, CUDA)


def test_our_names_are_not_taken_by_others(other_package):
    assert type(make_comm("local", 1, CPU)) is LocalComm


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "broken",
            r"\(broken_comm:Comm of fast-comm 1.5\) could not be imported: ModuleNotFoundError: .*a_library_that_is",
        ),
        ("three", r"\(fast_comm:no_plugin of fast-comm 1.5\) is not a subclass of CommPlugin but 3"),
    ],
)
def test_a_registered_plugin_that_is_broken_says_why(other_package, name, reason):
    with pytest.raises(ValueError, match=f"comm '{name}' {reason}"):
        make_comm(name, 1, CPU)
