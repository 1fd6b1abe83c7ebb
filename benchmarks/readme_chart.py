"""Draw the README's chart of the time that DDP adds to a step, from the newest result: `make readme-chart`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchddp.harness.plots import figure_png, finish_panel, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
CHART = Path(__file__).parents[1] / "docs" / "images" / "cost_of_ddp.png"

_BARS = (("torch, default", "#c1c9d2"), ("torch, at its best", "#7b8794"), ("torchddp, default", "#d9480f"))
_BAR_HEIGHT = 0.26


def added_ms(result: dict[str, Any]) -> dict[str, list[float]]:
    """Median milliseconds that each of `_BARS` adds to a step, by model."""
    found = {}
    for model in result["results"]:
        costs = {row["name"]: row["cost"][1] for row in model["variants"] if "cost" in row}
        found[model["title"]] = [costs["torch default"], costs[model["best_torch"]], costs["torchddp default"]]
    return found


def drawn(added: dict[str, list[float]]) -> Figure:
    figure, axes = panels(1, 1, 8.0, 3.6)
    axis = axes[0][0]
    for bar, (label, color) in enumerate(_BARS):
        places = [model + (bar - 1) * _BAR_HEIGHT for model in range(len(added))]
        costs = [times[bar] for times in added.values()]
        drawn_bars = axis.barh(places, costs, 0.9 * _BAR_HEIGHT, label=label, color=color)
        axis.bar_label(drawn_bars, [f"{cost:.1f}" for cost in costs], padding=3, fontsize=8)
    axis.set_yticks(range(len(added)), list(added))
    axis.invert_yaxis()
    axis.tick_params(left=False)
    axis.legend(frameon=False, loc="lower right", fontsize=9)
    finish_panel(axis, "What DDP adds to a training step (2 CPU ranks, lower is better)", "ms")
    return figure


def main(
    result: Annotated[Path | None, typer.Argument(help="Summary of the case `exposed`. Default: the newest.")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = CHART,
) -> None:
    """Draw the time that DDP adds to a training step."""
    source = result or max(RESULTS.glob("*-exposed-*.json"))
    out.write_bytes(figure_png(drawn(added_ms(json.loads(source.read_text()))), dpi=160))
    typer.echo(f"{source.name} -> {out}")


if __name__ == "__main__":
    typer.run(main)
