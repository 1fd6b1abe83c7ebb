"""Accelerate and the transformers Trainer on torchddp's engine, without patching either (docs/accelerate.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchddp.integrations import require

if TYPE_CHECKING:
    from torchddp.integrations.accelerate.accelerator import Accelerator, adopt
    from torchddp.integrations.accelerate.options import TorchDDPKwargs
    from torchddp.integrations.accelerate.trainer import TorchDDPTrainer, TorchDDPTrainerMixin
    from torchddp.integrations.accelerate.weights import weigh

__all__ = ["Accelerator", "TorchDDPKwargs", "TorchDDPTrainer", "TorchDDPTrainerMixin", "adopt", "weigh"]

# Name: its module, and the package that this needs.
_MODULES = {
    "Accelerator": ("accelerator", "accelerate"),
    "TorchDDPKwargs": ("options", "accelerate"),
    "TorchDDPTrainer": ("trainer", "transformers"),
    "TorchDDPTrainerMixin": ("trainer", "transformers"),
    "adopt": ("accelerator", "accelerate"),
    "weigh": ("weights", "accelerate"),
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package = _MODULES[name]
    require("accelerate", "accelerate")
    require(package, package)
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
