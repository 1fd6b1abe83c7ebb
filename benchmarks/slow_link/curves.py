"""From losses along the way to the seconds until one loss. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchddp.harness.stats import running_median

# One look to either side: a fixed evaluation set leaves little noise.
HALF_WINDOW = 1


@dataclass(frozen=True)
class Point:
    """A look at a method's model, after so many of its own steps and seconds."""

    steps: int
    seconds: float
    loss: float


def smoothed(points: Sequence[Point]) -> list[float]:
    """Losses, each the median of itself and its neighbours; the last look has one neighbour only and is left out.

    So a look's number does not change when more of them follow. The first, before training, stays as it is.
    """
    losses = [point.loss for point in points]
    inner = running_median(losses, HALF_WINDOW)[HALF_WINDOW:-HALF_WINDOW]
    return [*losses[:HALF_WINDOW], *map(float, inner)]


def target_of(points: Sequence[Point]) -> float:
    """The loss that a curve comes to: its last but one, smoothed."""
    if len(points) < 2 * HALF_WINDOW + 1:
        raise ValueError(f"a curve needs {2 * HALF_WINDOW + 1} looks, got {len(points)}")
    return smoothed(points)[-1]


def arrival(points: Sequence[Point], target: float) -> tuple[float, float] | None:
    """(steps, seconds) at which the smoothed curve first is at the target or below, linear between looks; else None.

    The first point is the untrained model, at zero seconds. A loss that is no number is not there.
    """
    losses = smoothed(points)
    for index, loss in enumerate(losses):
        if not loss <= target:
            continue
        after, above = points[index], losses[index - 1] if index else loss
        before = points[index - 1] if index else after
        share = (above - target) / (above - loss) if math.isfinite(above) and above > loss else 1.0
        return (
            before.steps + share * (after.steps - before.steps),
            before.seconds + share * (after.seconds - before.seconds),
        )
    return None
