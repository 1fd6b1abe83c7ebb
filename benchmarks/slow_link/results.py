"""Turns the race into the numbers we quote. Pure."""

from __future__ import annotations

from typing import Any

from benchmarks.slow_link.bounds import TORCH_DDP, fastest, judge
from benchmarks.slow_link.curves import Point, arrival
from torchddp.harness.stats import summarize


def method_row(name: str, what: str, raw: dict[str, Any], target: float) -> dict[str, Any]:
    """One method's row; `arrival` is None if it did not reach the loss."""
    row: dict[str, Any] = {"name": name, "what": what}
    if "error" in raw:
        return {**row, "error": raw["error"], "arrival": None}
    found = arrival([Point(*point) for point in raw["points"]], target)
    return {
        **row,
        **raw,
        "step_s": summarize(raw["step_seconds"]).to_dict(),
        "arrival": None if found is None else {"steps": found[0], "seconds": found[1]},
    }


def race_result(raw: dict[str, Any], whats: dict[str, str]) -> dict[str, Any]:
    """All methods' rows, each with torch DDP's best time over its own, and the judged bounds."""
    rows = [method_row(name, whats[name], method, raw["target"]) for name, method in raw["methods"].items()]
    seconds = {row["name"]: row["arrival"]["seconds"] for row in rows if row["arrival"] is not None}
    best = fastest(TORCH_DDP, seconds)
    for row in rows:
        row["speedup"] = seconds[best] / seconds[row["name"]] if best and row["name"] in seconds else None
    return {
        "case": "slow_link",
        **{key: value for key, value in raw.items() if key != "methods"},
        "best_torch": best,
        "methods": rows,
        "comparisons": judge(seconds, tuple(raw["methods"])),
    }
