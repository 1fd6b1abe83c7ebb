"""The rooms of csrc and of the package include only what stands below them (docs/architecture.md)."""

import ast
import graphlib
import re
import subprocess
import sys
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

# Modules and rooms of the package, lower ones first: each may import those before it.
PACKAGE = (
    "_import_check",
    "errors",
    "traffic",
    "transport",
    "ddp",
    "distributed",
    "whole_file",
    "diagnose",
    "plan",
    "comm_hooks",
    "averaging",
    "composable",
    "sync",
    "sharded",
    "optim",
    "parallel",
    "fault_tolerance",
    "harness",
    "profiler",
    "simulate",
    "integrations",
    "run",
    "bench",
    "cli",
    "__main__",
)
MOST_MODULES = 30


def modules_of(package: Path) -> dict[str, Path]:
    """By dotted name, without the package's own ``__init__``, which only lists what others have."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != package.name:
            found[name] = path
    return found


def imports_of(package: Path) -> dict[str, set[str]]:
    """Which modules each module imports anywhere in its file: in functions and for type checkers too."""
    modules = modules_of(package)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    own = module if path.name == "__init__.py" else module.rpartition(".")[0]
                    parent = own.split(".")[: len(own.split(".")) - node.level + 1]
                    base = ".".join([*parent, base] if base else parent)
                # `from torchddp import x` names a module or an attribute: a module only if there is such a file.
                inner = {f"{base}.{alias.name}" for alias in node.names} & set(modules)
                names |= inner if len(inner) == len(node.names) else inner | {base}
        graph[module] = names & set(modules) - {module}
    return graph


def import_problems(package: Path) -> list[str]:
    """Circles between modules, rooms without a place in `PACKAGE`, and imports of what stands above."""
    graph = imports_of(package)
    problems = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        problems.append(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")
    for module, names in sorted(graph.items()):
        room = module.split(".")[1]
        if room not in PACKAGE:
            problems.append(f"{module}: '{room}' is no room of the package")
            continue
        above = [name for name in sorted(names) if name.split(".")[1] not in PACKAGE[: PACKAGE.index(room) + 1]]
        problems += [f"{module} may not import {name}" for name in above]
    return problems


def test_imports_follow_the_rooms_without_a_circle() -> None:
    assert len(modules_of(ROOT / "torchddp")) > 100
    assert import_problems(ROOT / "torchddp") == []


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("ddp/a.py", "import torchddp.cli.b", "ddp.a may not import torchddp.cli.b"),
        ("ddp/a.py", "from torchddp.plan import b", "ddp.a may not import torchddp.plan.b"),
        ("ddp/a.py", "def f():\n    from ..plan import b", "ddp.a may not import torchddp.plan.b"),
        ("transport/a.py", "if TYPE_CHECKING:\n    from torchddp.ddp.b import c", "may not import torchddp.ddp.b"),
        ("ddp/a.py", "from torchddp.ddp import c\n", "a circle of imports: torchddp.ddp."),
        ("attic/a.py", "", "'attic' is no room"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, line: str, words: str) -> None:
    package = tmp_path / "torchddp"
    for room in ("transport", "ddp", "plan", "cli", "attic"):
        (package / room).mkdir(parents=True)
        (package / room / "b.py").write_text("from torchddp import errors\n" if room != "attic" else "")
    (package / "attic" / "b.py").unlink()
    (package / "errors.py").touch()
    (package / "ddp" / "c.py").write_text("if TYPE_CHECKING:\n    from torchddp.ddp import a\n")
    path = package / file
    path.write_text("from torchddp import errors\nfrom torchddp.transport.b import something\n")
    if "attic" not in file and "transport" not in file:
        assert import_problems(tmp_path / "torchddp") == []
    path.write_text(f"{line}\n")
    assert any(words in problem for problem in import_problems(tmp_path / "torchddp"))


def test_import_torchddp_loads_little() -> None:
    """What a program without compression, planning and sharding has no use for is not loaded."""
    listing = "import sys, torchddp; print(*(m for m in sys.modules if m.split('.')[0] == 'torchddp'))"
    done = subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True, cwd=ROOT)
    loaded = done.stdout.split()
    assert "torchddp.ddp.module" in loaded and len(loaded) <= MOST_MODULES, loaded
    allowed = PACKAGE[: PACKAGE.index("ddp") + 1] + ("_C",)
    assert [name for name in loaded if name != "torchddp" and name.split(".")[1] not in allowed] == []
