"""Turns raw times into the numbers we quote. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.cases import GOALS, LEAVE_CASE, MEMORY_CASE, MODELS_CASE
from torchddp.bench.gradients import timed_result
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.variants import Variant


def model_result(
    case: str, variants: Sequence[Variant], raw: dict[str, Any], world_size: int, torch_lacks: Sequence[str]
) -> dict[str, Any]:
    """One model: steps, costs and ratios by device time; host time; device work per step."""
    result = timed_result(MODELS_CASE, variants, raw, world_size)
    result["case"] = case
    # Goals apply to one rank per GPU, not to ranks that share one.
    result["goal_ratio"] = GOALS[raw["model"]] if case == MODELS_CASE.name and world_size == 1 else None
    result["torch_lacks"] = list(torch_lacks)
    rows = zip(result["variants"], raw["host_ms"], raw["work"], raw["transports"], strict=True)
    for row, host_ms, work, transport in rows:
        row["host_ms"] = summarize(host_ms).to_dict()
        row["work_per_step"] = work
        row["transport"] = transport
    return result


def duel_result(raw: dict[str, Any]) -> dict[str, Any]:
    """The time of each alternative and its speed relative to the first; GB/s where bytes are moved."""
    first, *_ = raw["times_us"].values()
    rows = []
    for name, times_us in raw["times_us"].items():
        values = {"us": summarize(times_us).to_dict()}
        if "bytes" in raw:
            values["GB/s"] = summarize(raw["bytes"] / times_us / 1e3).to_dict()
        speed = None if times_us is first else paired_ratio(first, times_us).to_dict()
        rows.append({"name": name, "values": values, "speed": speed, "goal": raw.get("goal", {}).get(name)})
    return {"case": raw["case"], "title": raw["title"], "note": raw.get("note", ""), "rows": rows}


def memory_result(raws: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One model's variants, no DDP first: megabytes by each count; by the first count, also the excess over no DDP."""
    first = next(iter(raws[0]["bytes"]))
    rows = []
    for raw in raws:
        values = {f"{count}\nMB": size / 1e6 for count, size in raw["bytes"].items()}
        if raw is not raws[0]:
            values[f"{first}, more than\nno DDP, MB"] = (raw["bytes"][first] - raws[0]["bytes"][first]) / 1e6
        rows.append({"name": raw["variant"], "values": values})
    return {"case": MEMORY_CASE, "title": f"{raws[0]['title']}, memory after some steps", "note": "", "rows": rows}


def leave_result(raw: dict[str, Any]) -> dict[str, Any]:
    """Each class: ms to load data in forked processes, to leave the group, and to end the process."""
    headings = {"loading_ms": "load, forked\nms", "leaving_ms": "leave group\nms", "ending_ms": "end process\nms"}
    rows = [
        {"name": name, "values": {headings[what]: summarize(ms).to_dict() for what, ms in times_ms.items()}}
        for name, times_ms in raw["times_ms"].items()
    ]
    return {"case": LEAVE_CASE, "title": "a program ends with its model alive", "note": "", "rows": rows}
