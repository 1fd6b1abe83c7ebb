"""A line through measured times of messages. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def fit_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(alpha, beta) of ``seconds = alpha + beta * nbytes``, neither below zero.

    ``samples``: (nbytes, seconds > 0). Relative errors count, so that a message of a kilobyte says as much about alpha
    as one of a megabyte about beta.

    Raises:
        ValueError: no samples, or a time that is not positive.
    """
    if not samples or any(seconds <= 0 for _, seconds in samples):
        raise ValueError(f"fitting a line needs positive times, got {list(samples)}")
    # Least squares of (alpha + beta * n - t) / t: minimise sum((alpha * u + beta * v - 1)^2), u = 1 / t, v = n / t.
    u = [1 / seconds for _, seconds in samples]
    v = [nbytes / seconds for nbytes, seconds in samples]
    uu, uv, vv = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        alpha = (sum(u) * vv - sum(v) * uv) / determinant
        beta = (sum(v) * uu - sum(u) * uv) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # On the edge of what is allowed one of them is zero: the one that leaves the smaller error.
    edges = [(sum(u) / uu, 0.0)]
    if vv > 0:
        edges.append((0.0, sum(v) / vv))
    return min(edges, key=lambda edge: sum((edge[0] * a + edge[1] * b - 1) ** 2 for a, b in zip(u, v, strict=True)))


def misfit(samples: Sequence[tuple[float, float]], alpha: float, beta: float) -> float:
    """Median relative distance of the samples from the line."""
    return statistics.median(abs(alpha + beta * nbytes - seconds) / seconds for nbytes, seconds in samples)
