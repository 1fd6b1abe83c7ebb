"""Folders of csrc and of the package depend only on lower layers (docs/architecture.md)."""

import ast
import graphlib
import importlib.util
import re
from pathlib import Path

from tests.programs import ROOT, python

# Lower folders first; folders of equal rank don't include each other.
FOLDERS = [["common"], ["plan", "kernels", "timeline"], ["shm", "gpu"], ["transport"], ["shm_backend", "bucket"]]
FOLDERS += [
    ["reducer/base"],
    ["reducer/report"],
    ["reducer/reduce", "reducer/graph"],
    ["reducer/pack"],
    ["reducer"],
    ["bindings"],
]
RANK = {folder: rank for rank, folders in enumerate(FOLDERS) for folder in folders}
# Only the bindings include it: what trains a model doesn't need it.
APART = "shm_backend"
# Free of torch and Python, because their tests run alone under sanitizers.
TORCH_FREE = {"plan", "kernels", "timeline", "shm", "gpu"}
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cc", ".cu"}


def folder_of(path: Path) -> str:
    """The innermost folder with a rank, else the outermost."""
    folders = [folder.as_posix() for folder in path.parents if folder.as_posix() in RANK]
    return folders[0] if folders else path.parts[0]


def include_problems(csrc: Path) -> list[str]:
    """Includes in `csrc` of a higher or equal layer, or of torch from a torch-free folder."""
    problems = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SUFFIXES):
        where = path.relative_to(csrc)
        folder = folder_of(where)
        for quoted, angled in INCLUDE.findall(path.read_text()):
            target = folder_of(Path(quoted)) if quoted else folder
            is_torch = folder in TORCH_FREE and TORCH_HEADER.match(quoted or angled)
            is_apart = target == APART and folder not in (APART, "bindings")
            is_lower = target == folder or RANK[target] < RANK[folder]
            if is_torch or is_apart or not is_lower:
                problems.append(f"{where}: folder '{folder}' may not include {quoted or angled}")
    return problems


def test_includes_and_imports_follow_the_layers() -> None:
    assert any((ROOT / "csrc").rglob("*.cpp"))
    assert include_problems(ROOT / "csrc") == []
    assert len(modules_of(ROOT / "torchddp")) > 100
    assert import_problems(ROOT / "torchddp") == []


# Modules and folders of the package, lower ones first; each may import those before it.
PACKAGE = """_command _extension _build _import_check _torch durations errors traffic notices transport ddp distributed
    whole_file diagnose plan comm_hooks averaging composable sync sharded optim parallel fault_tolerance harness
    profiler simulate integrations run bench cli _assembly __main__""".split()


def modules_of(package: Path) -> dict[str, Path]:
    """Modules by dotted name, without the package's own ``__init__``, which only re-exports names."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != package.name:
            found[name] = path
    return found


def imports_of(package: Path) -> dict[str, set[str]]:
    """The modules that each module imports anywhere, also in functions and for type checkers, or names in a string."""
    modules = modules_of(package)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        strings: set[str] = set()
        loggers: set[int] = set()
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getLogger":
                loggers.update(map(id, node.args))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loggers:
                strings.add(node.value)
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    own = module if path.name == "__init__.py" else module.rpartition(".")[0]
                    base = importlib.util.resolve_name("." * node.level + base, own)
                # In `from torchddp import x`, x is a module only if there is such a file.
                inner = {f"{base}.{alias.name}" for alias in node.names} & set(modules)
                names |= inner if len(inner) == len(node.names) else inner | {base}
        names |= {text.partition(":")[0] for text in strings}
        graph[module] = names & set(modules) - {module}
    return graph


def import_problems(package: Path) -> list[str]:
    """Imports of higher layers; raises CycleError for a circle of imports, and ValueError for an unknown layer."""
    graph = imports_of(package)
    graphlib.TopologicalSorter(graph).prepare()
    layer = {module: PACKAGE.index(module.split(".")[1]) for module in graph}
    return [
        f"{module} may not import {name}" for module in graph for name in graph[module] if layer[name] > layer[module]
    ]


def test_import_torchddp_loads_few_modules() -> None:
    """It loads nothing that only compression, planning and sharding need, and of torch no compiler."""
    listing = (
        "import torch, sys; before = set(sys.modules); import torchddp; print(*(set(sys.modules) - before))\n"
        "print(torchddp.profiler.profile.__name__, torchddp.optim.OSS.__name__)"  # without importing them
    )
    done = python("-c", listing)
    new, names = (line.split() for line in done.stdout.splitlines())
    assert names == ["profile", "OSS"]
    heavy = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "matplotlib", "rich", "numpy.testing"}
    assert not heavy & set(new)
    loaded = [name for name in new if name.split(".")[0] == "torchddp"]
    assert "torchddp.ddp.module" in loaded and len(loaded) <= 36, (loaded, done.stderr)
    allowed = {*PACKAGE[: PACKAGE.index("ddp") + 1], "_C", "_assembly"}
    assert {name.split(".")[1] for name in loaded if name != "torchddp"} <= allowed
