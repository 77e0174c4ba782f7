"""Who may import whom: the arrows between the rooms, checked on the source, so that nothing has to be importable."""

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "olmoe_lightning"

# Room -> rooms of the project it may import besides itself. A room that is not listed may import what it likes.
ALLOWED = {
    "errors": set(),
    "files": set(),
    "progress": set(),
    "config": {"errors"},
    "kernels": set(),
    "parallel": {"errors"},
    "model": {"kernels", "config", "errors"},
    "data": {"config", "errors", "files", "progress"},
    "checkpoint": {"config", "model", "parallel", "errors", "files", "progress"},
    "plugins": {"kernels", "parallel", "errors"},
    "training": {"checkpoint", "config", "data", "errors", "kernels", "model", "parallel", "plugins", "_lightning"},
}
# Room -> the only third-party packages it may import.
THIRD_PARTY = {
    "config": set(),
    "files": set(),
    "progress": {"tqdm"},
    "kernels": {"torch", "triton"},
    "parallel": {"torch"},
    "model": {"torch"},
}


def room_files(room: str, root: Path = ROOT) -> list[Path]:
    """Source files of a room; plugins and callbacks stand at the top of the repository."""
    base = root / room if room in ("plugins", "callbacks") else root / PACKAGE / room
    return (
        sorted(base.rglob("*.py")) if base.is_dir() else [path for path in [base.with_suffix(".py")] if path.exists()]
    )


def imports(path: Path, root: Path = ROOT) -> set[tuple[str, str]]:
    """(module, name) of every import of a file, lazy and typing-only ones too; no name in ``import module``."""
    relative = path.relative_to(root).with_suffix("")
    parts = list(relative.parts) if relative.parts[0] == PACKAGE else [PACKAGE, *relative.parts]
    package = parts[:-1]
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {(module, alias.name) for alias in node.names}
    return found


def public_names() -> set[str]:
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("the package has no __all__")


def room_of(module: str, name: str) -> str:
    """The room an import reaches; importing a name from the package itself reaches what the name is."""
    parts = [*module.split("."), name] if module == PACKAGE else module.split(".")
    return parts[1] if len(parts) > 1 else ""


def violations(room: str, root: Path = ROOT) -> list[str]:
    bad = []
    for path in room_files(room, root):
        for module, name in imports(path, root):
            top = module.split(".")[0]
            if top == PACKAGE:
                wrong = room_of(module, name) not in {room, *ALLOWED[room]}
            else:
                wrong = room in THIRD_PARTY and top not in {*sys.stdlib_module_names, *THIRD_PARTY[room]}
            if wrong:
                bad.append(f"{path.relative_to(root)} imports {module} {name}".rstrip())
    return sorted(bad)


def private_imports_of_callbacks(files: Iterable[Path], root: Path = ROOT) -> list[str]:
    """What callbacks take from the project beyond their own room and the names the package exports."""
    public = public_names()
    return sorted(
        f"{path.name} imports {module} {name}".rstrip()
        for path in files
        for module, name in imports(path, root)
        if module.split(".")[0] == PACKAGE
        and not module.startswith(f"{PACKAGE}.callbacks")
        and module != f"{PACKAGE}.errors"
        and (module, name) != (PACKAGE, "callbacks")
        and name not in public
    )


@pytest.mark.parametrize("room", list(ALLOWED))
def test_a_rule_is_about_files_that_exist(room):
    assert room_files(room)


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_below_it(room):
    assert violations(room) == []


def test_callbacks_use_only_the_public_surface():
    files = room_files("callbacks")
    assert files
    assert private_imports_of_callbacks(files) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("model", "import lightning.pytorch"),
        ("model", "from olmoe_lightning.data import TokenDataModule"),
        ("model", "from olmoe_lightning import OLMoE"),
        ("model", "def f():\n    from ..module import OLMoE"),
        ("kernels", "from olmoe_lightning.config import ModelConfig"),
        ("kernels", "from ..model.router import Router"),
        ("kernels", "import numpy"),
        ("data", "from olmoe_lightning.model import Transformer"),
        ("data", "from olmoe_lightning import module"),
        ("data", "import olmoe_lightning.module"),
        ("plugins", "from olmoe_lightning.model.moe import MoE"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, room, line):
    home = tmp_path / room if room == "plugins" else tmp_path / PACKAGE / room
    home.mkdir(parents=True)
    (home / "fine.py").write_text(f"import math\nfrom olmoe_lightning.{room}.other import thing\nfrom . import more\n")
    assert violations(room, tmp_path) == []
    (home / "wrong.py").write_text(line + "\n")
    assert len(violations(room, tmp_path)) == 1


def test_a_private_import_of_a_callback_is_found(tmp_path):
    (tmp_path / "callbacks").mkdir()
    path = tmp_path / "callbacks" / "mine.py"
    path.write_text("from olmoe_lightning import ModelConfig\nfrom olmoe_lightning.callbacks import MemoryMonitor\n")
    assert private_imports_of_callbacks([path], tmp_path) == []
    path.write_text("from olmoe_lightning.model.router import top_k_stable\n")
    assert len(private_imports_of_callbacks([path], tmp_path)) == 1
