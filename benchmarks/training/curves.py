"""Computes the seconds to a target loss from a curve of losses. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchddp.harness.stats import running_median

# One evaluation on either side: a fixed evaluation set leaves little noise.
HALF_WINDOW = 1


@dataclass(frozen=True)
class Point:
    """An evaluation of a method's model, after this many of its own steps and seconds."""

    steps: int
    seconds: float
    loss: float


def smoothed(points: Sequence[Point]) -> list[float]:
    """Replaces each loss by the median of itself and its neighbors; drops the last, which has no right neighbor.

    So smoothed values don't change when later ones arrive. The first loss, before training, is kept unchanged.
    """
    losses = [point.loss for point in points]
    inner = running_median(losses, HALF_WINDOW)[HALF_WINDOW:-HALF_WINDOW]
    return [*losses[:HALF_WINDOW], *map(float, inner)]


def target_of(points: Sequence[Point]) -> float:
    """The loss at which a curve ends: the last smoothed value."""
    if len(points) < 2 * HALF_WINDOW + 1:
        raise ValueError(f"a curve needs {2 * HALF_WINDOW + 1} evaluations, got {len(points)}")
    return smoothed(points)[-1]


def arrival(points: Sequence[Point], target: float) -> tuple[float, float] | None:
    """The (steps, seconds) at which the smoothed curve first reaches the target, or None if it never does.

    Linear between evaluations; the first is of the untrained model, at zero seconds. A loss of NaN reaches no target.
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
