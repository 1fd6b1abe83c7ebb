"""Stubs of torchvision and mcli, which Composer imports but the tested training doesn't use.

torchvision has no build for the tested torch, and mcli is the client of a commercial service, so both are stub modules
whose attributes are empty classes. `python -m tests.clients.composer_stubs script.py args` runs a script with the
stubs.
"""

import importlib.abc
import importlib.machinery
import runpy
import sys
from types import ModuleType
from typing import Any

STUBBED = ("torchvision", "mcli")


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Does nothing where the real ones are installed."""
    import torchmetrics  # noqa: F401  it detects torchvision, and would mistake the stub for the real one

    global STUBBED
    STUBBED = tuple(name for name in STUBBED if importlib.machinery.PathFinder.find_spec(name) is None)
    sys.meta_path.append(_Finder())


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
