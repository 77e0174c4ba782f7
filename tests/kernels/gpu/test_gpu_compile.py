"""Every Triton kernel compiles for three generations of GPUs, none of which is needed, to what is expected of it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from olmoe_lightning.kernels.gpu.compile import SHARED_LIMIT, TENSOR_CORE, collect, main

CASES = {each.name: each for each in collect()}
ALL = [(name, sm) for name, each in CASES.items() for sm in each.architectures]


def one_of_each_kind(cases):
    """One instance of each kernel for each architecture, of a product in each direction: all would take a minute."""
    found = {}
    for name, sm in cases:
        each = CASES[name]
        found.setdefault((each.kernel, sm, each.tensor_core and frozenset(each.constants)), (name, sm))
    # A kernel of products also has instances without tensor cores, for fp32.
    products = {each.kernel for each in CASES.values() if each.tensor_core}
    return [case for (kernel, _, tensor), case in found.items() if tensor or kernel not in products]


FEW = one_of_each_kind(ALL)


def build(cases, environment, folder):
    """What comes out of a process in which kernels are not interpreted."""
    command = [sys.executable, str(Path(__file__).with_name("compile_some.py")), str(folder)]
    options = {"input": json.dumps(cases), "capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found, case, sm):
    """Registers suffice, shared memory too, tensor cores are used by products and by nothing else."""
    assert found["stack_bytes"] == 0
    assert 0 < found["registers"] <= 255
    assert found["shared_bytes"] <= SHARED_LIMIT[sm]
    assert found["tensor_core"] == (TENSOR_CORE[sm] if case.tensor_core else "")
    assert (found["instructions"]["tensor"] > 0) == case.tensor_core
    # Else the constants made the compiler throw the kernel away, and nothing of the above means anything.
    assert found["instructions"]["stores"] > 0
    assert found["instructions"]["loads"] > 0


@pytest.fixture(scope="session")
def built(compiling_environment, tmp_path_factory):
    """All of this file's kernels, from one process."""
    return build(FEW, compiling_environment, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("case", FEW, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_kernel_compiles_without_spilling_and_uses_the_tensor_cores_that_it_should(built, case):
    check(built["kernels"][FEW.index(case)], CASES[case[0]], case[1])


@pytest.mark.slow
def test_so_does_every_other_instance(compiling_environment, tmp_path):
    others = [case for case in ALL if case not in FEW]
    found = build(others, compiling_environment, tmp_path)["kernels"]
    for (name, sm), each in zip(others, found, strict=True):
        check(each, CASES[name], sm)


@pytest.mark.parametrize("sm", sorted(TENSOR_CORE))
def test_each_architecture_has_every_kernel(sm):
    chosen = [CASES[name] for name, architecture in FEW if architecture == sm]
    assert {each.kernel for each in chosen} == {each.kernel for each in CASES.values()}
    assert {each.tensor_core for each in chosen} == {True, False}


def test_what_does_not_fit_into_registers_is_seen(built):
    assert built["controls"]["fits"]["stack_bytes"] == 0
    assert built["controls"]["does not fit"]["stack_bytes"] > 0


def test_a_kernel_without_products_has_no_tensor_core_instruction(built):
    """So one that should have them, and has them not, is seen."""
    found = built["controls"]["fits"]
    assert found["tensor_core"] == ""
    assert found["instructions"]["tensor"] == 0
    product = next(each for each in CASES.values() if each.tensor_core)
    check(found, dataclasses.replace(product, tensor_core=False), 90)
    with pytest.raises(AssertionError):
        check(found, product, 90)


def test_every_kernel_of_the_package_has_a_case(built):
    covered = set().union(*built["reached"].values())
    assert covered == set(built["written"])


def test_a_kernel_without_a_case_would_be_seen(built):
    kernels = set(map(tuple, built["reached"].values()))
    for left_out in kernels:
        others = set().union(*(set(names) for names in kernels if names != left_out))
        assert not set(built["written"]) <= others


def test_the_command_says_why_it_cannot_compile(capsys):
    """Here kernels are interpreted."""
    assert main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_the_command_says_that_triton_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["--json"]) == 2
    said = capsys.readouterr()
    assert "pip install triton" in said.err
    assert said.out == ""


def test_the_command_prints_a_table_or_one_line_of_json(built):
    name, sm = FEW[0]
    status, text = built["table"]
    heading, *lines = text.splitlines()
    assert status == 0
    assert "registers" in heading
    assert any(line.startswith(name) and str(sm) in line for line in lines)
    status, text = built["json"]
    assert status == 0
    found = json.loads(text)["kernels"]
    assert [(each["name"], each["sm"]) for each in found] == [(name, sm)] * len(found) != []
    assert found[0]["registers"] == built["kernels"][0]["registers"]
