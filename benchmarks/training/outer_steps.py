"""How often ranks of local methods meet, and what they do then. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterSteps:
    """Of DiLoCo and Streaming DiLoCo; the wire is DiLoCo's, Streaming DiLoCo has its paper's.

    The paper's outer learning rate and momentum, 0.7 and 0.9, are for long runs from trained weights. In a run of a
    dozen outer steps from random weights so much momentum is still under way when the run ends.
    """

    sync_every: int
    lr: float
    momentum: float
    wire: str
