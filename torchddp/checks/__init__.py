"""Checks of what should hold by itself: parameters equal on all ranks, gradients finite."""

from torchddp.checks.nonfinite import NonFinite
from torchddp.checks.parameters import check_parameters

__all__ = ["NonFinite", "check_parameters"]
