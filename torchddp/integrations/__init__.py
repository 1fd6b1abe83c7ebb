"""torchddp under the programs that train with DistributedDataParallel. See docs/integrations.md.

Nothing of ours is imported here: each module needs its client (`require`), but for `install`, which needs none.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, package: str) -> ModuleType:
    """The imported ``module``. ImportError, in one line that says how to install ``package``, if that is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # something that the client needs
        raise ImportError(f"{error.name} is not installed: pip install {package}") from None
