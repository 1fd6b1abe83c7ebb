"""How often local methods synchronize, and with which outer optimizer. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterSteps:
    """Settings of DiLoCo. `wire` is for the method without fragments; the one with fragments uses its paper's.

    The paper's outer learning rate and momentum, 0.7 and 0.9, are for long runs from trained weights. In a run of a
    dozen outer steps from random weights, that much momentum has not yet taken effect when the run ends.
    """

    sync_every: int
    lr: float
    momentum: float
    wire: str
