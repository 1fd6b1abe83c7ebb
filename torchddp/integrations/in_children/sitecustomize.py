"""Installs torchddp in Python processes that a program starts, if TORCHDDP_INSTALL says so: see `reach_children`.

This folder is on their PYTHONPATH, and Python imports the first module of this name when it starts. So this one costs
almost nothing until torch is imported, and then imports the one that it hides.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes longer than the rest
    from typing import Any


class _WhenTorchIsImported:
    """Imports torchddp after torch, which installs it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader

            def exec_module(module: Any) -> None:
                del loader.exec_module
                loader.exec_module(module)
                _import_torchddp()

            loader.exec_module = exec_module
        return spec


def _import_torchddp() -> None:
    try:
        import torchddp  # noqa: F401
    except ImportError as error:
        if error.name != "torchddp":  # it is there
            sys.stderr.write(f"TORCHDDP_INSTALL has no effect in process {os.getpid()}: {error}\n")


def _import_the_hidden_one() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    del sys.modules["sitecustomize"]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = _this


_this = sys.modules["sitecustomize"]
if os.environ.get("TORCHDDP_INSTALL", "") not in ("", "0"):
    if "torch" in sys.modules:
        _import_torchddp()
    else:
        sys.meta_path.insert(0, _WhenTorchIsImported())
_import_the_hidden_one()
