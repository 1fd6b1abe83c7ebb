"""Results on disk: one JSON and one plot per case."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchddp.bench.plot import save_plot
from torchddp.harness.machine import machine_slug

SavePlot = Callable[[Sequence[dict[str, Any]], Path], None]


def save_results(document: dict[str, Any], folder: Path, own_plots: Mapping[str, SavePlot] | None = None) -> list[Path]:
    """Write <date>-<case>-<machine>.json and .png for each case; the paths written.

    `own_plots`: by case, who draws it if not we.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for case in dict.fromkeys(result["case"] for result in document["results"]):
        results = [result for result in document["results"] if result["case"] == case]
        stem = f"{document['date'][:10]}-{case}-{machine_slug(document['machine'])}"
        json_path, plot_path = folder / f"{stem}.json", folder / f"{stem}.png"
        json_path.write_text(json.dumps({**document, "results": results}, indent=1, allow_nan=False) + "\n")
        (own_plots or {}).get(case, save_plot)(results, plot_path)
        written += [json_path, plot_path]
    return written
