"""From the steps of several launches to efficiencies. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchddp.bench.step_time.results import compared_rows
from torchddp.harness.variants import Variant


def scaling_result(variants: Sequence[Variant], raws: Mapping[int, dict[str, Any]], cores: int) -> dict[str, Any]:
    """The result of one model, from what each world size gave; one of them is 1, which efficiency is held against."""
    alone_ms: list[float] = []
    sizes = []
    for world_size, raw in sorted(raws.items()):
        best, rows = compared_rows(variants, raw["step_ms"])
        alone_ms = alone_ms or [row["step_ms"]["median"] for row in rows]
        for row, alone in zip(rows, alone_ms, strict=True):
            row["efficiency"] = alone / row["step_ms"]["median"]
        sizes.append(
            {
                "world_size": world_size,
                "oversubscribed": world_size > cores,
                "rounds": int(raw["step_ms"].shape[1]),
                "best_torch": best,
                "variants": rows,
            }
        )
    first = next(iter(raws.values()))
    return {
        "case": "scaling",
        **{key: first[key] for key in ("model", "title", "parameters", "gradient_bytes")},
        "unit": "ms",
        "sizes": sizes,
    }
