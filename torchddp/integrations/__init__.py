"""torchddp under frameworks that train with DistributedDataParallel. See docs/integrations.md.

Imports nothing itself: each module needs its framework (`require`), except `install`, which needs none.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection
from types import ModuleType


def require(module: str, package: str) -> ModuleType:
    """Import and return ``module``. If it is missing, raise an ImportError that says how to install ``package``."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # a dependency of the framework
        raise ImportError(f"{error.name} is not installed: pip install {package}") from None


def keyword_options(wrapper: Callable[..., object], without: Collection[str]) -> list[inspect.Parameter]:
    """A wrapper's arguments but for some, keyword-only and with evaluated types, for a signature that lists them."""
    parameters = inspect.signature(wrapper, eval_str=True).parameters
    return [each.replace(kind=each.KEYWORD_ONLY) for name, each in parameters.items() if name not in without]
