"""From raw times to the numbers we quote. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.cases import MODELS_CASE, PACK_CASE, PACK_GOAL
from torchddp.bench.results import timed_result
from torchddp.bench.stats import paired_ratio, summarize
from torchddp.bench.variants import Variant


def model_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """One model: steps, costs and ratios by the device's clock; the host's time; the device's work per step."""
    result = timed_result(MODELS_CASE, variants, raw, world_size)
    rows = zip(result["variants"], raw["host_ms"], raw["work"], raw["transports"], strict=True)
    for row, host_ms, work, transport in rows:
        row["host_ms"] = summarize(host_ms).to_dict()
        row["work_per_step"] = work
        row["transport"] = transport
    return result


def pack_result(raw: dict[str, Any]) -> dict[str, Any]:
    """One size: bandwidth of each implementation in GB/s (read and written), and its share of the plain copy's."""
    # Bytes in a millisecond are a millionth of a GB in a second.
    bandwidths = [
        raw["elements"] * per_element / times_ms / 1e6
        for per_element, times_ms in zip(raw["bytes_per_element"], raw["time_ms"], strict=True)
    ]
    rows = []
    for index, name in enumerate(raw["names"]):
        rows.append(
            {
                "name": name,
                "time_us": summarize(raw["time_ms"][index] * 1000.0).to_dict(),
                "gb_per_s": summarize(bandwidths[index]).to_dict(),
                # The plain copy comes first.
                "ratio_to_copy": None if index == 0 else paired_ratio(bandwidths[index], bandwidths[0]).to_dict(),
            }
        )
    return {
        "case": PACK_CASE,
        "bytes": raw["bytes"],
        "tensors": raw["tensors"],
        "sets": raw["sets"],
        "rounds": int(raw["time_ms"].shape[1]),
        "goal_ratio": PACK_GOAL,
        "implementations": rows,
    }
