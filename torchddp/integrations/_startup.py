"""TORCHDDP_INSTALL=1: installs torchddp in a process whose program never imports it.

Installed beside the package too, as the top-level module `_torchddp_startup`: a `.pth` file of site-packages imports it
when Python starts, if the variable is set (`setup.py` writes both). So it must cost nothing: no torch, no torchddp. It
waits for the program to import torch, and then for the first use of torch's DistributedDataParallel. A process that
never wraps a model (torchrun's agent, workers of a data loader) does not import torchddp at all.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

ENV = "TORCHDDP_INSTALL"
OFF = ("", "0")
TORCH_MODULE = "torch.nn.parallel.distributed"


class _WaitForTorch:
    """A finder that finds nothing by itself: it sees that torch is being imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _call_after(spec.loader, arm)
        return spec


def _call_after(loader: Any, then: Any) -> None:
    """Has the loader call ``then`` once it has executed its module, and leaves the loader as it was."""
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module  # this one: the class has its own
        execute(module)
        then()

    loader.exec_module = exec_module


def arm() -> None:
    """From now on the first use of torch's class (a call, a class derived from it) imports torchddp.

    That has to be as late: torchddp needs all of torch, and costs time. A metaclass sees such a use, whatever name the
    class was reached by.
    """
    module = sys.modules.get(TORCH_MODULE)
    if module is None or "torchddp" in sys.modules:  # whose own import installs
        return
    torch_class = module.DistributedDataParallel
    plain: Any = type(torch_class)

    def install() -> None:
        torch_class.__class__ = plain
        try:
            import torchddp  # noqa: F401  installs, for the variable is set
        except BaseException:
            torch_class.__class__ = armed  # the next use must not silently get torch's
            raise

    class Armed(plain):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is torch_class and type(cls) is Armed:
                install()
                return cls(*args, **kwargs)
            return super().__call__(*args, **kwargs)

        def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
            if str(namespace.get("__module__")).partition(".")[0] == "torchddp":  # its import will end with installing
                torch_class.__class__ = plain
            elif type(torch_class) is Armed:
                install()
            return type(torch_class)(name, bases, namespace, **kwargs)

    armed = Armed
    torch_class.__class__ = armed


def start() -> None:
    """Called when Python starts, by the `.pth` file, where the variable is set."""
    if os.environ.get(ENV, "") in OFF:
        return
    if TORCH_MODULE in sys.modules:
        arm()
    elif not any(isinstance(finder, _WaitForTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WaitForTorch())  # type: ignore[arg-type]
