"""Rows, tables and bar plots shared by the results of several cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from torchddp.harness.plots import COLORS, finish_panel, panels
from torchddp.harness.stats import paired_ratio, running_median, summarize
from torchddp.harness.tables import MB, bytes_text, plain_table, ranks_text
from torchddp.harness.variants import Role, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rounds on either side that the median of the local step includes: few enough to follow the machine's drift, enough to
# keep the noise of a single local step out of all costs of its round.
LOCAL_HALF_WINDOW = 4


def describe_variant(variant: Variant) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))  # for JSON
    options = {key: value if isinstance(value, plain) else repr(value) for key, value in variant.options.items()}
    return {"name": variant.name, "role": variant.role.value, "class": variant.class_path, "options": options}


def model_result(
    case: str, raw: dict[str, Any], world_size: int, rows: list[dict[str, Any]], **about: object
) -> dict[str, Any]:
    model = {key: raw[key] for key in ("model", "title", "parameters", "gradient_bytes")}
    return {"case": case, **model, "world_size": world_size, **about, "variants": rows}


def variants_table(
    result: dict[str, Any], columns: Sequence[str], cells: Callable[[dict[str, Any]], Sequence[str | Text]]
) -> Table:
    rounds = f", {result['rounds']} rounds" if "rounds" in result else ""
    weight = f"{result['title']}: {result['parameters']} parameters, {bytes_text(result['gradient_bytes'])}"
    title = f"{result['case']} · {weight}, {ranks_text(result['world_size'])}{rounds}"
    table = plain_table(title, "variant", *columns)
    for row in result["variants"]:
        table.add_row(row["name"], *cells(row), style="bold" if row["role"] == "ours" else "")
    return table


def added_ms(variants: Sequence[Variant], step_ms: np.ndarray) -> np.ndarray:
    """What each wrapper adds to the local step near its round: [variant, round], in ms."""
    local = next(index for index, variant in enumerate(variants) if variant.role is Role.LOCAL)
    added: np.ndarray = step_ms - running_median(step_ms[local], LOCAL_HALF_WINDOW)
    return added


def compared_rows(
    variants: Sequence[Variant], times_ms: np.ndarray, key: str = "step_ms"
) -> tuple[str, list[dict[str, Any]]]:
    """The name of torch's fastest row, and a row per variant with its time and its per-round ratio to that row."""
    summaries = [summarize(row) for row in times_ms]
    candidates = [index for index, variant in enumerate(variants) if variant.role is Role.TORCH]
    # It is chosen by the numbers that are then reported, which favors torch.
    best = min(candidates, key=lambda index: summaries[index]["median"])
    rows = [
        {
            **describe_variant(variant),
            key: summaries[index],
            "ratio_to_best_torch": None if index == best else paired_ratio(times_ms[index], times_ms[best]).to_dict(),
        }
        for index, variant in enumerate(variants)
    ]
    return variants[best].name, rows


def _bars(result: dict[str, Any], key: str, with_local: bool) -> list[tuple[str, str, float, float, float]]:
    """Each bar's (name, role, height, below, above); the error bar, if any, spans p25 to p75."""
    found = []
    for row in result["variants"]:
        if row["role"] == "local" and not with_local:
            continue
        if isinstance(row[key], dict):
            median = row[key]["median"]
            found.append((row["name"], row["role"], median, median - row[key]["q25"], row[key]["q75"] - median))
        else:
            found.append((row["name"], row["role"], row[key] / MB, 0.0, 0.0))
    return found


def draw_bars(
    results: Sequence[dict[str, Any]], key: str = "cost", label: str = "", *, with_local: bool = False
) -> Figure:
    count, most = len(results), max(len(result["variants"]) for result in results)
    figure, (axes,) = panels(1, count, 2.0 + 3.4 * count, 1.4 + 0.36 * most, sharey=True)
    for axis, result in zip(axes, results, strict=True):
        names, roles, heights, below, above = zip(*_bars(result, key, with_local), strict=True)
        positions = range(len(names))
        colors = [COLORS[role] for role in roles]
        axis.barh(positions, heights, xerr=[below, above], color=colors, error_kw={"elinewidth": 1, "capsize": 2})
        axis.set_yticks(positions, names)
        xlabel = label or f"{key}, {result['unit']} (p25..p75)"
        finish_panel(axis, f"{result['title']}, {ranks_text(result['world_size'])}", xlabel)
    axes[0].invert_yaxis()
    return figure
