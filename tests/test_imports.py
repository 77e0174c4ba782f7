"""Who may import whom, checked on the source: arrows between rooms, no circle of files, homes of private names."""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "olmoe_lightning"
TOP_ROOMS = ("plugins", "callbacks")  # at the top of the repository, installed inside of the package

# Room -> rooms of the project that it may import besides itself. Every file and folder of the package is a room and has
# to be listed. `public` is what the package exports.
LEAVES = {"errors", "files", "progress", "_torch", "_lightning"}
EVERYTHING_BELOW = {"checkpoint", "config", "data", "kernels", "model", "parallel", "plugins", "training", *LEAVES}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "progress": set(),
    "_torch": set(),
    "_lightning": set(),
    "config": {"errors"},
    "kernels": {"_torch"},
    "parallel": {"errors", "_torch"},
    "model": {"kernels", "config", "errors", "_torch"},
    "data": {"config", "errors", "files", "progress", "_lightning"},
    "checkpoint": {"config", "model", "parallel", "errors", "files", "progress", "_torch"},
    "plugins": {"kernels", "parallel", *LEAVES},
    "training": EVERYTHING_BELOW - {"training"},
    "strategy": EVERYTHING_BELOW,
    "module": {"strategy", *EVERYTHING_BELOW},  # which strategy trains it decides what it builds
    "tools": {"public", "module", "strategy", *EVERYTHING_BELOW} - {"training", "data", "_lightning", "_torch"},
    "callbacks": {"public", "plugins", "errors"},
    "commands": {"public", "module", "strategy", "training", "callbacks", "tools", "checkpoint", "data", "errors"},
    "cli": {"public", "strategy", "commands", "tools", "checkpoint", "data", "errors"},
    "__init__": {"config", "checkpoint", "data", "model", "module", "strategy"},
}
# Room -> the only third-party packages that it may import; a room that is not listed may import what is installed.
THIRD_PARTY: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "progress": {"tqdm"},
    "_torch": {"torch"},
    "_lightning": {"lightning"},
    "config": set(),
    "kernels": {"torch", "triton", "typing_extensions"},
    "parallel": {"torch"},
    "model": {"torch", "typing_extensions"},
}
# Packages whose private names stand in one file each.
COMPATIBILITY = {"torch": f"{PACKAGE}/_torch.py", "lightning": f"{PACKAGE}/_lightning.py"}
# Methods that torch and torchmetrics call by a private name; only a subclass can have them.
OVERRIDDEN = {"_apply"}
# Underscored, and public all the same: methods of named tuples, and the end of a process without its clean-up.
PUBLIC_ALL_THE_SAME = {"_asdict", "_fields", "_make", "_replace", "_exit"}


def files_of(root: Path) -> list[Path]:
    """Source files of the package under a root."""
    return [path for top in (PACKAGE, *TOP_ROOMS) for path in sorted((root / top).rglob("*.py"))]


def room_of_file(path: Path, root: Path) -> str:
    first, *rest = path.relative_to(root).with_suffix("").parts
    return first if first in TOP_ROOMS else rest[0]


def room_files(room: str, root: Path = ROOT) -> list[Path]:
    return [path for path in files_of(root) if room_of_file(path, root) == room]


def module_of(path: Path, root: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == PACKAGE else (PACKAGE, *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path, _changed: int) -> ast.Module:
    return ast.parse(path.read_text())


def parsed(path: Path) -> ast.Module:
    return tree_of(path, path.stat().st_mtime_ns)


def imports(path: Path, root: Path = ROOT) -> set[tuple[str, str]]:
    """(module, name) of every import of a file, lazy and typing-only ones too; no name in ``import module``."""
    package = module_of(path, root).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    found: set[tuple[str, str]] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {(module, alias.name) for alias in node.names}
    return found


@cache
def public_names() -> frozenset[str]:
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError("the package has no __all__")


def reached(module: str, name: str) -> str:
    """The room that an import reaches; ``public`` for a name that the package exports, and the package itself."""
    parts = [*module.split("."), *([name] if name else [])] if module == PACKAGE else module.split(".")
    return "public" if len(parts) < 2 or parts[1] in public_names() else parts[1]


def violations(room: str, root: Path = ROOT) -> list[str]:
    bad = []
    for path in room_files(room, root):
        for module, name in imports(path, root):
            top = module.split(".")[0]
            if top == PACKAGE:
                wrong = reached(module, name) not in {room, *ALLOWED[room]}
            else:
                wrong = room in THIRD_PARTY and top not in {*sys.stdlib_module_names, *THIRD_PARTY[room]}
            if wrong:
                bad.append(f"{path.relative_to(root)} imports {module} {name}".rstrip())
    return sorted(bad)


def import_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """For each file of the package, by the name of its module, the files that it imports."""
    modules = {module_of(path, root): path for path in files_of(root)}
    return {
        module: {
            target
            for name, member in imports(path, root)
            for target in (name, f"{name}.{member}")
            if target in modules and target != module
        }
        for module, path in modules.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that import each other, directly or through others of the group."""

    def below(module: str) -> set[str]:
        found: set[str] = set()
        ahead = [module]
        while ahead:
            ahead += (new := graph[ahead.pop()] - found)
            found |= new
        return found

    reach = {module: below(module) for module in graph}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other])) for module in graph
    }  # a file that reaches itself is in a circle with all that reach it back
    return [list(group) for group in sorted(groups) if group]


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(root: Path = ROOT) -> set[str]:
    """Every name that a file of ours defines or assigns."""
    found: set[str] = set()
    for path in files_of(root):
        for node in ast.walk(parsed(path)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.arg(arg=name) | ast.alias(asname=str(name)):
                    found.add(name)
    return found - OVERRIDDEN


def private_uses(path: Path, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, text) of imports and attributes with a private name that no file of ours defines: it is someone else's."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.ImportFrom(module=str(module), level=0, names=names) if not module.startswith((PACKAGE, "_")):
                for alias in names:
                    if any(private(part) for part in [*module.split("."), alias.name]):
                        yield node.lineno, f"from {module} import {alias.name}"
            case ast.Import(names=names):
                for alias in names:
                    if any(private(part) for part in alias.name.split(".")):
                        yield node.lineno, f"import {alias.name}"
            case ast.Attribute(attr=name) if private(name) and name not in own | PUBLIC_ALL_THE_SAME:
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(str(name)), *_]):
                if private(name) and name not in own:
                    yield node.lineno, ast.unparse(node)


def private_names_outside(files: Iterable[Path], root: Path = ROOT) -> list[str]:
    own = own_names(root)
    return [
        f"{path.relative_to(root)}:{line}: {text}"
        for path in files
        if str(path.relative_to(root)) not in COMPATIBILITY.values()
        for line, text in private_uses(path, own)
        if not (text.startswith("super().") and text.removeprefix("super().") in OVERRIDDEN)
    ]


def test_every_room_has_a_rule_and_every_rule_a_room():
    assert {room_of_file(path, ROOT) for path in files_of(ROOT)} == set(ALLOWED)
    assert set(THIRD_PARTY) <= set(ALLOWED)
    assert set().union(*ALLOWED.values()) - {"public"} <= set(ALLOWED)


def test_the_arrows_between_rooms_have_no_circle():
    assert circles({room: targets - {"public", room} for room, targets in ALLOWED.items()}) == []


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_below_it(room):
    assert violations(room) == []


def test_no_files_import_each_other_in_a_circle():
    assert circles(import_graph()) == []


def test_private_names_of_others_stand_in_one_file_each():
    assert private_names_outside(files_of(ROOT)) == []


@pytest.mark.parametrize("package", COMPATIBILITY)
def test_a_compatibility_file_has_the_names_of_one_package(package):
    tops = {module.split(".")[0] for module, _ in imports(ROOT / COMPATIBILITY[package])}
    assert tops - set(sys.stdlib_module_names) == {package}


def written(root: Path, name: str, text: str) -> Path:
    path = root / name if name.split("/")[0] in TOP_ROOMS else root / PACKAGE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


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
        ("parallel", "from lightning.pytorch import Trainer"),
        ("parallel", "from olmoe_lightning.plugins.comm.base import CommPlugin"),
        ("data", "from olmoe_lightning.model import Transformer"),
        ("data", "from olmoe_lightning import module"),
        ("data", "import olmoe_lightning.module"),
        ("checkpoint", "from olmoe_lightning.training.saver import Saver"),
        ("plugins", "from olmoe_lightning.model.moe import MoE"),
        ("training", "from olmoe_lightning.strategy import MoEStrategy"),
        ("training", "if TYPE_CHECKING:\n    from olmoe_lightning import OLMoE"),
        ("tools", "from olmoe_lightning.cli import main"),
        ("callbacks", "from olmoe_lightning.model.router import top_k_stable"),
        ("callbacks", "from olmoe_lightning import strategy"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, room, line):
    fine = f"import math\nfrom olmoe_lightning.{room}.other import thing\nfrom . import more\n"
    written(tmp_path, f"{room}/fine.py", fine)
    if "public" in ALLOWED[room]:
        written(tmp_path, f"{room}/public.py", "from olmoe_lightning import ModelConfig\n")
    assert violations(room, tmp_path) == []
    written(tmp_path, f"{room}/wrong.py", line + "\n")
    assert len(violations(room, tmp_path)) == 1


@pytest.mark.parametrize(
    "back",
    [
        "from olmoe_lightning.model.a import x",
        "from . import a",
        "def f():\n    from .a import x",
        "if TYPE_CHECKING:\n    import olmoe_lightning.model.a",
        "from olmoe_lightning.model.c import y",
    ],
)
def test_a_circle_of_files_is_found(tmp_path, back):
    written(tmp_path, "model/a.py", "from olmoe_lightning.model.b import x\n")
    written(tmp_path, "model/c.py", "from olmoe_lightning.model import a\n")
    b = written(tmp_path, "model/b.py", "import torch\n")
    assert circles(import_graph(tmp_path)) == []
    b.write_text(back + "\n")
    (circle,) = circles(import_graph(tmp_path))
    assert {"olmoe_lightning.model.a", "olmoe_lightning.model.b"} <= set(circle)


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "from torch._utils import anything",
        "import torch._dynamo",
        "def f():\n    from torch.distributed import _symmetric_memory",
        "torch._foreach_mul_([], 2.0)",
        "def f(trainer):\n    return trainer._checkpoint_connector",
        "def f(module):\n    return getattr(module, '_trainer', None)",
        "class Mine(Strategy):\n    def setup(self):\n        self._reset_optimizers_and_schedulers()",
        "class Mine(nn.Module):\n    def f(self):\n        return super()._named_members()",
        "class Mine(nn.Module):\n    def f(self, cast):\n        return self._apply(cast)",
    ],
)
def test_a_private_name_of_someone_else_is_found(tmp_path, line):
    fine = "class Mine(nn.Module):\n    def _own(self):\n        self._x = 1\n        super()._apply(self._x)\n"
    path = written(tmp_path, "model/fine.py", fine + "\nMine()._own\nMine()._x\nlayout._replace(a=1)\n")
    assert private_names_outside([path], tmp_path) == []
    path = written(tmp_path, "model/wrong.py", line + "\n")
    assert len(private_names_outside([path], tmp_path)) == 1


def test_a_room_without_a_rule_is_found(tmp_path):
    path = written(tmp_path, "novelties/a.py", "")
    assert room_of_file(path, tmp_path) not in ALLOWED
