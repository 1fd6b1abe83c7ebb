"""Shorten a benchmark's JSON for the repository: `python -m benchmarks.summary RESULT.json benchmarks/results`.

Numbers keep three significant digits, and a distribution its quartiles, ``[25%, median, 75%]``. Curves (shown in
the plots) and values derived from others are dropped. More than `MANY_ROWS` rows are grouped and counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

MANY_ROWS = 100
LINE_WIDTH = 160

_DROPPED = {
    *("curve", "points", "step_seconds", "samples_ms", "profile"),
    *("algbw_gb_per_s", "busbw_gb_per_s", "slowest_rank_us", "class"),
}
_GROUPED_BY = ("kind", "over", "passed")


def summarized(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        if {"q25", "median", "q75"} <= value.keys():
            return [summarized(value[key]) for key in ("q25", "median", "q75")]
        kept = {key: summarized(entry) for key, entry in value.items() if key not in _DROPPED}
        return {key: entry for key, entry in kept.items() if entry not in (None, {}, [])}
    if isinstance(value, list):
        return _grouped(value) if len(value) > MANY_ROWS else [summarized(entry) for entry in value]
    return value


def _grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per value of `_GROUPED_BY`: the number of rows, and the quartiles of their seconds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in _GROUPED_BY), []).append(row)
    return [
        {**dict(zip(_GROUPED_BY, key, strict=True)), "count": len(members), **_quartiles_of_seconds(members)}
        for key, members in sorted(groups.items())
    ]


def _quartiles_of_seconds(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    measured = {key: [row[key] for row in rows if row[key] is not None] for key in rows[0] if key.endswith("_s")}
    return {key: summarized(np.percentile(times, [25, 50, 75]).tolist()) for key, times in measured.items() if times}


def dumped(value: Any, indent: int = 0) -> str:
    """JSON with as much on each line as fits."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) + indent <= LINE_WIDTH or not isinstance(value, dict | list):
        return text
    inner, outer = "\n" + " " * (indent + 1), "\n" + " " * indent
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {dumped(entry, indent + 1)}" for key, entry in value.items()]
        return "{" + inner + ("," + inner).join(entries) + outer + "}"
    return "[" + inner + ("," + inner).join(dumped(entry, indent + 1) for entry in value) + outer + "]"


def main(
    result: Annotated[Path, typer.Argument(help="A benchmark's JSON.", exists=True, dir_okay=False)],
    folder: Annotated[Path, typer.Argument(help="Where to write the summary; it keeps its name.", file_okay=False)],
) -> None:
    """Shorten a benchmark's JSON for the repository."""
    target = folder / result.name
    target.write_text(dumped(summarized(json.loads(result.read_text()))) + "\n")
    typer.echo(f"wrote {target}, {target.stat().st_size / 1024:.1f} KiB")


if __name__ == "__main__":
    typer.run(main)
