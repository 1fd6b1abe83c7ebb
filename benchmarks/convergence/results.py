"""Turns curves into the numbers we quote. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.convergence.bounds import REFERENCE, bound_of

Run = dict[str, Any]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def final_loss(run: Run) -> float:
    """The loss at the last evaluation."""
    loss: float = run["curve"][-1][1]
    return loss


def first_error(runs: Sequence[Run]) -> str | None:
    """The first error among a method's runs, a non-finite loss included."""
    for run in runs:
        if "error" in run:
            error: str = run["error"]
            return error
        if not all(math.isfinite(point[1]) for point in run["curve"]):
            return f"loss is not finite, seed {run['seed']}"
    return None


def mean_curve(runs: Sequence[Run], units_per_step: int) -> list[dict[str, float | None]]:
    """Units seen, bytes sent per rank and held-out loss, averaged over seeds."""
    points = []
    for same in zip(*(run["curve"] for run in runs), strict=True):
        known = [point[2] for point in same if point[2] is not None]
        points.append(
            {
                "units": same[0][0] * units_per_step,
                "loss": mean([point[1] for point in same]),
                "bytes": mean(known) if len(known) == len(same) else None,
            }
        )
    return points


def ratio_to(reference: Sequence[Run], runs: Sequence[Run]) -> dict[str, float]:
    """Final losses over the reference's, seed by seed: mean, lowest and highest."""
    ratios = [final_loss(run) / final_loss(other) for run, other in zip(runs, reference, strict=True)]
    return {"mean": mean(ratios), "low": min(ratios), "high": max(ratios)}


def method_row(raw: dict[str, Any], method: str, what: str) -> dict[str, Any]:
    """One method's row. `holds`: whether the mean ratio stays within the bound; None without a bound or a ratio."""
    runs, reference = raw["runs"][method], raw["runs"][REFERENCE]
    bound = bound_of(method)
    row: dict[str, Any] = {"name": method, "what": what, "bound": bound.at_most, "reason": bound.reason}
    error = first_error(runs)
    if error is not None:
        return {**row, "error": error, "holds": None if bound.at_most is None else False}
    curve = mean_curve(runs, raw["units_per_step"])
    sent = curve[-1]["bytes"]
    ratio = None if first_error(reference) is not None else ratio_to(reference, runs)
    return {
        **row,
        "bytes_per_step": None if sent is None else sent / raw["steps"],
        "loss": mean([final_loss(run) for run in runs]),
        "losses": [final_loss(run) for run in runs],
        "ratio": ratio,
        "holds": None if bound.at_most is None or ratio is None else ratio["mean"] <= bound.at_most,
        "curve": curve,
    }


def task_result(raw: dict[str, Any], whats: dict[str, str]) -> dict[str, Any]:
    """One task: a row for each method that ran; `whats` describes each."""
    return {
        "case": "convergence",
        **{key: value for key, value in raw.items() if key != "runs"},
        "seeds": len(raw["runs"][REFERENCE]),
        "methods": [method_row(raw, method, whats[method]) for method in raw["runs"]],
    }
