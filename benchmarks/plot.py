"""One picture per case: bars with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = {"torch": "#9aa5b1", "ours": "#d9480f", "peer": "#4c6ef5", "local": "#dee2e6"}


def bars(result: dict[str, Any]) -> list[tuple[str, str, float, float, float]]:
    """(name, role, height, below, above) of each bar; the spread reaches from p25 to p75."""
    found = []
    for row in result["variants"]:
        if row["role"] == "local":
            continue
        if result["case"] == "memory":
            found.append((row["name"], row["role"], row["extra_bytes"] / 1e6, 0.0, 0.0))
        else:
            cost = row["cost"]
            median = cost["median"]
            found.append((row["name"], row["role"], median, median - cost["q25"], cost["q75"] - median))
    return found


def save_plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per model, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = max(len(result["variants"]) for result in results)
    figure, axes = pyplot.subplots(
        1, len(results), figsize=(2.0 + 3.4 * len(results), 1.2 + 0.36 * count), sharey=True, squeeze=False
    )
    for axis, result in zip(axes[0], results, strict=True):
        entries = bars(result)
        positions = range(len(entries))
        axis.barh(
            positions,
            [entry[2] for entry in entries],
            xerr=[[entry[3] for entry in entries], [entry[4] for entry in entries]],
            color=[COLORS[entry[1]] for entry in entries],
            error_kw={"elinewidth": 1, "capsize": 2},
        )
        axis.set_yticks(positions, [entry[0] for entry in entries])
        axis.set_title(f"{result['title']}, {result['world_size']} ranks".replace(" 1 ranks", " 1 rank"), fontsize=9)
        axis.set_xlabel("MB beyond no DDP" if result["case"] == "memory" else f"cost, {result['unit']} (p25..p75)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
