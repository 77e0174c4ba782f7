"""What is installed: all folders of the package, nothing at the top of site-packages, pins inside their ranges."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from olmoe_lightning.cli import main

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP_FOLDERS = {"plugins": "olmoe_lightning.plugins", "callbacks": "olmoe_lightning.callbacks"}


def package_of(folder):
    first, *rest = folder.relative_to(ROOT).parts
    return ".".join([TOP_FOLDERS.get(first, first), *rest])


def python_folders():
    for top in ("olmoe_lightning", *TOP_FOLDERS):
        yield from (path.parent for path in (ROOT / top).rglob("__init__.py"))


def test_every_python_folder_is_named_as_a_package():
    assert sorted(map(package_of, python_folders())) == sorted(PROJECT["tool"]["setuptools"]["packages"])
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {name: top for top, name in TOP_FOLDERS.items()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names of the files in a wheel that is built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("olmoe_lightning", *TOP_FOLDERS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    (path,) = source.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_puts_nothing_but_the_package_at_the_top(wheel):
    assert {name.split("/")[0] for name in wheel} == {"olmoe_lightning", "olmoe_lightning-0.1.0.dist-info"}
    assert "olmoe_lightning/callbacks/throughput.py" in wheel
    assert "olmoe_lightning/plugins/__init__.py" in wheel


def test_the_wheel_holds_every_source_file(wheel):
    missing = []
    for top in ("olmoe_lightning", *TOP_FOLDERS):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                target = f"{package_of(path.parent).replace('.', '/')}/{path.name}"
                if target not in wheel:
                    missing.append(target)
    assert missing == []


def test_the_installed_package_is_complete_anywhere(tmp_path):
    code = (
        "from importlib.util import find_spec\n"
        "names = ('olmoe_lightning.callbacks', 'olmoe_lightning.plugins', 'callbacks', 'plugins')\n"
        "print([name for name in names if find_spec(name)])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "['olmoe_lightning.callbacks', 'olmoe_lightning.plugins']", result.stderr


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_are_exact_public_versions_and_name_no_place():
    for name, pinned in pins().items():
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", name)
        assert re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", pinned), f"{name}=={pinned}"


def test_constraints_pin_every_direct_dependency_inside_its_range():
    pinned = {name.lower().replace("_", "-"): value for name, value in pins().items()}
    project = PROJECT["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), text
    assert pinned["torch"] == "2.13.0"


def test_compromised_releases_of_lightning_are_refused():
    (lightning,) = (r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == "lightning")
    assert not any(lightning.specifier.contains(bad) for bad in ("2.6.2", "2.6.3"))


def test_transformers_is_an_extra_and_triton_for_linux_only():
    names = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}
    assert "transformers" not in names
    assert not names["triton"].marker.evaluate({"sys_platform": "darwin"})


def test_the_command_is_installed():
    (command,) = entry_points(group="console_scripts", name="olmoe-lightning")
    assert command.load() is main


def test_the_version_is_one_number():
    import olmoe_lightning

    assert version("olmoe-lightning") == PROJECT["project"]["version"] == olmoe_lightning.__version__


def test_the_citation_is_of_this_version_and_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["project"]["version"], PROJECT["project"]["license"])


def test_hooks_before_a_commit_run_what_is_installed_for_tests():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    extra = {Requirement(text).name for text in PROJECT["project"]["optional-dependencies"]["test"]}
    scripts = {script.name: script.dist.name.replace("_", "-") for script in entry_points(group="console_scripts")}
    for hook in repository["hooks"]:
        program = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert hook["language"] == "system"
        assert scripts.get(program, program) in extra  # ruff is a program of its own, without an entry point


def test_the_last_of_all_checks_are_the_tests():
    steps = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert steps == ["make lint", "make spell", "make types", "make coverage", "make test"]
