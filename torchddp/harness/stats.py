"""Medians, quartiles and paired ratios. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class PairedRatio:
    median: float
    q25: float
    q75: float
    # 95% confidence interval of the median, without assumptions about the distribution.
    ci95_low: float
    ci95_high: float
    rounds: int
    # Rounds in which noise made theirs cost nothing or less: see `paired_ratio`.
    odd_rounds: int

    def to_dict(self) -> dict[str, float | int | None]:
        """For JSON, which has no infinity: infinite numbers become None."""
        return {key: value if math.isfinite(value) else None for key, value in asdict(self).items()}


def summarize(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    fractions = {"median": 0.5, "p90": 0.9, "q25": 0.25, "q75": 0.75, "p99": 0.99}
    return {name: float(np.quantile(values, fraction)) for name, fraction in fractions.items()}


def _quantile(ordered: np.ndarray, fraction: float) -> float:
    # np.quantile interpolates inf - inf into nan; the nearest rank does not.
    return float(ordered[min(len(ordered) - 1, max(0, math.ceil(fraction * len(ordered)) - 1))])


# With fewer values, the median lies outside of all of them with a probability above 5%: 2 * 0.5**5 for five.
_LEAST_FOR_INTERVAL = 6


def median_interval(ordered: np.ndarray) -> tuple[float, float]:
    """95% interval of the median from order statistics (normal approximation of the binomial); infinite if too few."""
    if len(ordered) < _LEAST_FOR_INTERVAL:
        return -math.inf, math.inf
    half_width = 1.96 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - half_width))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half_width))
    return float(ordered[low]), float(ordered[high])


def paired_ratio(ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray) -> PairedRatio:
    """Compute each round's ratio, then the median and spread of the ratios.

    A cost is a difference of two timings, so noise can push it to zero or below. Dropping such rounds would bias the
    result, so they count as +inf if ours costs more than theirs, and else as 0; `odd_rounds` is their number.
    """
    ours_array, theirs_array = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    if ours_array.shape != theirs_array.shape or ours_array.ndim != 1 or len(ours_array) == 0:
        raise ValueError(f"a paired ratio needs two series of equal length, got {len(ours)} and {len(theirs)}")
    usable = theirs_array > 0
    ratios = np.where(ours_array > theirs_array, np.inf, 0.0)
    np.divide(ours_array, theirs_array, out=ratios, where=usable)
    ordered = np.sort(ratios)
    low, high = median_interval(ordered)
    return PairedRatio(
        median=_quantile(ordered, 0.5),
        q25=_quantile(ordered, 0.25),
        q75=_quantile(ordered, 0.75),
        ci95_low=low,
        ci95_high=high,
        rounds=len(ordered),
        odd_rounds=int(np.count_nonzero(~usable)),
    )


def running_median(values: Sequence[float] | np.ndarray, half_window: int) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    return np.array([np.median(array[max(0, i - half_window) : i + half_window + 1]) for i in range(len(array))])
