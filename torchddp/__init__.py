"""A faster ``torch.nn.parallel.DistributedDataParallel``: change one import.

    from torchddp import DistributedDataParallel as DDP

It is a subclass of torch's class and accepts the same arguments in the same order. See
:class:`torchddp.DistributedDataParallel` for the differences.
"""

from __future__ import annotations

import importlib
import os
import sys

from torchddp._command import is_command, only_explains  # before anything that takes time: see there
from torchddp._import_check import load_extension

TYPE_CHECKING = False  # importing typing's takes longer than the rest of this import
if TYPE_CHECKING:
    from torchddp import (  # noqa: F401
        averaging,
        comm_hooks,
        composable,
        distributed,
        fault_tolerance,
        integrations,
        optim,
        parallel,
        profiler,
        sync,
    )
    from torchddp.composable import replicate
    from torchddp.diagnose.fail_together import PeerFailedError, fail_together, finish_first
    from torchddp.diagnose.parameters import check_parameters
    from torchddp.diagnose.survivors import survivors
    from torchddp.integrations.install import install, installed, uninstall
    from torchddp.parallel import ParallelConfig, parallel_group_info, parallelize
    from torchddp.sharded import ShardedDataParallel
    from torchddp.sync.stop_together import StopTogether

import_error: Exception | None = None
if not only_explains():  # importing torch takes seconds
    try:
        import torch  # noqa: F401  the extension needs torch's libraries loaded first

        load_extension()

        from torchddp import _assembly  # noqa: F401  registers what models get from higher rooms
        from torchddp._C import finished_steps
        from torchddp.ddp.checks import Checks
        from torchddp.ddp.grad_precision import Precision
        from torchddp.ddp.module import DistributedDataParallel
        from torchddp.errors import DesyncError, InternalError, TransportError, UsageWarning
        from torchddp.transport.shm import register

        register()
        del register

        DDP = DistributedDataParallel
        if os.environ.get("TORCHDDP_INSTALL"):
            importlib.import_module("torchddp.integrations.install").install_by_variable()
    except (ImportError, OSError) as error:  # OSError: one of torch's libraries does not load
        if not is_command():
            raise
        import_error = error  # `torchddp doctor` explains what is wrong

__all__ = [
    "Checks",
    "DDP",
    "DesyncError",
    "DistributedDataParallel",
    "InternalError",
    "ParallelConfig",
    "PeerFailedError",
    "Precision",
    "ShardedDataParallel",
    "StopTogether",
    "TransportError",
    "UsageWarning",
    "__version__",
    "check_parameters",
    "fail_together",
    "finish_first",
    "finished_steps",
    "install",
    "installed",
    "parallel_group_info",
    "parallelize",
    "replicate",
    "survivors",
    "uninstall",
]

# Imported lazily, because most programs don't need these.
_MODULE_OF = {
    "ParallelConfig": "parallel",
    "PeerFailedError": "diagnose.fail_together",
    "ShardedDataParallel": "sharded",
    "StopTogether": "sync.stop_together",
    "check_parameters": "diagnose.parameters",
    "fail_together": "diagnose.fail_together",
    "finish_first": "diagnose.fail_together",
    "install": "integrations.install",
    "installed": "integrations.install",
    "parallel_group_info": "parallel",
    "parallelize": "parallel",
    "replicate": "composable",
    "survivors": "diagnose.survivors",
    "uninstall": "integrations.install",
}
_MODULES = (  # public as well, but not part of `from torchddp import *`
    "averaging",
    "comm_hooks",
    "composable",
    "distributed",
    "fault_tolerance",
    "integrations",
    "optim",
    "parallel",
    "profiler",
    "sync",
)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"torchddp.{_MODULE_OF[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"torchddp.{name}")
    if name == "__version__":  # lazy, because reading package metadata takes longer than the rest of this import
        from torchddp import _C

        return str(_C.version)
    raise AttributeError(f"module 'torchddp' has no attribute {name!r}")


def _register_with_lightning() -> None:
    try:
        importlib.import_module("torchddp.integrations.lightning")
    except Exception as error:  # an unknown version of Lightning; torchddp works without it
        import logging

        logging.getLogger("torchddp").warning(
            "Can't register torchddp's strategies with Lightning: %s: %s", type(error).__name__, error
        )


if import_error is None and "lightning.pytorch" in sys.modules:
    _register_with_lightning()
