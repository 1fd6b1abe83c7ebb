"""Accelerate on torchddp's engine, after ``torchddp.install()``: options, and weighted means (docs/integrations.md)."""

from __future__ import annotations

from torchddp.integrations import require

require("accelerate", "accelerate")

from torchddp.integrations.accelerate.handler import TorchDDPKwargs  # noqa: E402
from torchddp.integrations.accelerate.weights import weigh  # noqa: E402

__all__ = ["TorchDDPKwargs", "weigh"]
