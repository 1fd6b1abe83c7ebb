"""Training that continues when replicas die: models under a torchft Manager (docs/fault_tolerance.md)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchddp.fault_tolerance.averager import PeriodicAverager
    from torchddp.fault_tolerance.data_parallel import DistributedDataParallel, PureDistributedDataParallel
    from torchddp.fault_tolerance.manager import check_lighthouse
    from torchddp.fault_tolerance.replica_state import load_state_dict, state_dict

__all__ = [
    "DistributedDataParallel",
    "PeriodicAverager",
    "PureDistributedDataParallel",
    "check_lighthouse",
    "load_state_dict",
    "state_dict",
]

_MODULES = {
    "DistributedDataParallel": "data_parallel",
    "PeriodicAverager": "averager",
    "PureDistributedDataParallel": "data_parallel",
    "check_lighthouse": "manager",
    "load_state_dict": "replica_state",
    "state_dict": "replica_state",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torchft") is None:
        raise ImportError(f"{__name__}.{name} needs torchft: pip install torchft")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
