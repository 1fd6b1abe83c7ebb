"""Compares torchddp/_C.pyi with the built extension: the same names on both sides, members of classes included.

Signatures are not compared: pybind11 does not expose them. Special methods are compared in one direction (those in
the stub must exist), because pybind11 adds many of its own.
"""

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

STUB_PATH = Path(__file__).resolve().parent.parent / "torchddp" / "_C.pyi"
# pybind11 adds these to every class.
PYBIND11_NAMES = {"_pybind11_conduit_v1_"}


def is_special(name: str) -> bool:
    return name.startswith("__")  # pybind11's enums have `__entries` too


def assigned_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def stub_names(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Dotted names that a stub's body defines; imports are not definitions."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            names.add(prefix + node.name)
            names |= stub_names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(prefix + node.name)
        else:
            names |= {prefix + name for name in assigned_names(node)}
    return names


def built_names(scope: ModuleType | type, prefix: str = "") -> set[str]:
    """Dotted names that a module or class of the extension defines itself, special ones included."""
    names: set[str] = set()
    for name, value in vars(scope).items():
        if name in PYBIND11_NAMES or inspect.ismodule(value):
            continue
        names.add(prefix + name)
        # A class that is only referenced here (an alias, an inherited one) is checked where it is defined.
        if inspect.isclass(value) and value.__qualname__ == prefix + name:
            names |= built_names(value, f"{prefix}{name}.")
    return names


def compare(stub: set[str], built: set[str]) -> list[str]:
    problems = [f"in the stub, not in the extension: {name}" for name in sorted(stub - built)]
    missing = [name for name in sorted(built - stub) if not is_special(name.rpartition(".")[2])]
    return problems + [f"in the extension, not in the stub: {name}" for name in missing]


def main() -> None:
    extension = importlib.import_module("torchddp._C")
    stub = stub_names(ast.parse(STUB_PATH.read_text(), str(STUB_PATH)).body)
    problems = compare(stub, built_names(extension))
    for problem in problems:
        print(f"{STUB_PATH.name}: {problem}")
    if problems:
        sys.exit(1)
    print(f"{STUB_PATH.name}: {len(stub)} names match the extension")


if __name__ == "__main__":
    main()
