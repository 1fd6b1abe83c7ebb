"""The rooms of csrc and of the package include only what stands below them (docs/architecture.md)."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lower rooms first; rooms of equal rank do not know each other.
RANK = {
    "common": 0,
    "plan": 1,
    "kernels": 1,
    "timeline": 1,
    "shm": 2,
    "gpu": 2,
    "transport": 3,
    "bucket": 4,
    "reducer/base": 5,
    "reducer/report": 6,
    "reducer/reduce": 7,
    "reducer/graph": 7,
    "reducer/pack": 8,
    "reducer": 9,
    "bindings": 10,
}
# Tested alone, under sanitizers: free of torch and Python.
TORCH_FREE = {"plan", "kernels", "timeline", "shm", "gpu"}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cc", ".cu"}


def room_of(path: Path) -> str:
    """The innermost folder that has a rank, else the outermost."""
    folders = [folder.as_posix() for folder in path.parents if folder.as_posix() in RANK]
    return folders[0] if folders else path.parts[0]


def include_problems(csrc: Path) -> list[str]:
    """Every include in `csrc` that goes upwards, sideways, nowhere, or from a torch-free room to torch."""
    problems = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SUFFIXES):
        where = path.relative_to(csrc)
        room = room_of(where)
        if room not in RANK:
            problems.append(f"{where}: '{room}' is no room of csrc")
            continue
        for quoted, angled in INCLUDE.findall(path.read_text()):
            name = quoted or angled
            if room in TORCH_FREE and TORCH_HEADER.match(name):
                problems.append(f"{where}: room '{room}' is free of torch, but includes {name}")
            if not quoted:
                continue
            if not (csrc / name).is_file():
                problems.append(f"{where}: '{name}' is no file of csrc (paths start at csrc; <> for other headers)")
                continue
            target = room_of(Path(name))
            if target != room and not RANK.get(target, 99) < RANK[room]:
                problems.append(f"{where}: room '{room}' may not include '{target}' ({name})")
    return problems


def test_includes_follow_the_rooms() -> None:
    assert any((ROOT / "csrc").rglob("*.cpp"))
    assert include_problems(ROOT / "csrc") == []


@pytest.mark.parametrize(
    ("where", "line", "words"),
    [
        ("plan/a.h", '#include "reducer/b.h"', "may not include 'reducer'"),
        ("plan/a.h", '#  include "kernels/b.h"', "may not include 'kernels'"),
        ("common/a.h", '#include "plan/b.h"', "may not include 'plan'"),
        ("transport/c10d/a.cpp", '#include "bucket/b.h"', "may not include 'bucket'"),
        ("reducer/a.cpp", '#include "bindings/b.h"', "may not include 'bindings'"),
        ("reducer/graph/a.cpp", '#include "reducer/reduce/b.h"', "may not include 'reducer/reduce'"),
        ("reducer/pack/a.h", '#include "reducer/b.h"', "may not include 'reducer'"),
        ("kernels/a.cu", "#include <ATen/ATen.h>", "free of torch"),
        ("timeline/a.h", '#include "c10/util/Exception.h"', "free of torch"),
        ("reducer/a.cpp", '#include "missing.h"', "no file of csrc"),
        ("misc/a.cpp", "", "no room of csrc"),
    ],
)
def test_a_wrong_include_is_found(tmp_path: Path, where: str, line: str, words: str) -> None:
    for room in RANK:
        (tmp_path / room).mkdir(parents=True, exist_ok=True)
        (tmp_path / room / "b.h").write_text("#pragma once\n")
    path = tmp_path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#include <vector>\n{line}\n")
    problems = include_problems(tmp_path)
    assert problems and all(str(where) in problem for problem in problems)
    assert any(words in problem for problem in problems)


def test_right_includes_are_not_found(tmp_path: Path) -> None:
    for room, rank in RANK.items():
        (tmp_path / room).mkdir(parents=True, exist_ok=True)
        lower = [other for other, other_rank in RANK.items() if other_rank < rank]
        (tmp_path / room / "own.h").write_text("#pragma once\n")
        lines = [f'#include "{other}/own.h"' for other in [*lower, room]]
        (tmp_path / room / "a.cpp").write_text("\n".join([*lines, "#include <vector>", ""]))
    assert include_problems(tmp_path) == []


# --- Python ---


def module_path(package_parent: Path, module: str) -> Path | None:
    base = package_parent.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_modules(package_parent: Path, module: str) -> set[str]:
    """Modules of the same top-level package that `module` imports anywhere in its file, also inside functions."""
    path = module_path(package_parent, module)
    if path is None:
        return set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    tree = ast.parse(path.read_text(), str(path))
    if "." not in module:  # what the package's own list of names imports for type checkers, nothing does at run time
        tree.body = [node for node in tree.body if not is_for_type_checkers(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            # `from torchddp import x` names a module or an attribute: a module only if there is such a file.
            submodules = {f"{base}.{alias.name}" for alias in node.names}
            inner = {name for name in submodules if module_path(package_parent, name)}
            found |= inner
            if base != module.split(".")[0] or len(inner) < len(submodules):
                found.add(base)
    return {name for name in found if name.split(".")[0] == module.split(".")[0]}


def reachable_modules(package_parent: Path, module: str) -> set[str]:
    seen: set[str] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += imported_modules(package_parent, current)
    return seen


FORBIDDEN = ("torchddp.integrations", "torchddp.cli", "torchddp.averaging", "torchddp.composable", "torchddp.parallel")


def forbidden_modules(package_parent: Path) -> set[str]:
    reached = reachable_modules(package_parent, "torchddp.ddp.module")
    return {name for name in reached if name.startswith(FORBIDDEN)}


def test_distributed_knows_nothing_above_it() -> None:
    assert module_path(ROOT, "torchddp.ddp.module") is not None
    assert forbidden_modules(ROOT) == set()


@pytest.mark.parametrize(
    "line",
    [
        "import torchddp.cli",
        "from torchddp.integrations import lightning",
        "from torchddp import averaging",
        "from ..averaging import local_sgd",
        "def f():\n    from .. import cli",
        "from torchddp.middle import thing",
    ],
)
def test_an_import_upwards_is_found(tmp_path: Path, line: str) -> None:
    package = tmp_path / "torchddp"
    for name in ("integrations", "cli", "averaging", "ddp"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "middle.py").write_text("import torchddp.cli\n")
    (package / "ddp" / "module.py").write_text(f"import torch\n{line}\n")
    assert forbidden_modules(tmp_path)
    (package / "ddp" / "module.py").write_text("import torch\nfrom torchddp import errors\n")
    assert not forbidden_modules(tmp_path)
