"""What all tables have in common: their look, and how a number is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

MB = 1e6
MAX_WIDTH = 80


def number(value: float | None) -> str:
    """About three digits, without exponents."""
    if value is None:
        return "inf"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def ranks_text(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def weight_text(result: dict[str, Any]) -> str:
    """Which model, and how much there is to reduce."""
    return f"{result['title']}: {result['parameters']} parameters, {result['gradient_bytes'] / MB:.3g} MB"


def size_text(result: dict[str, Any]) -> str:
    """How much there is to reduce, and between how many ranks."""
    return f"{weight_text(result)}, {ranks_text(result['world_size'])}"


def ratio_text(ratio: dict[str, Any] | None, without: str = "1 (torch's best)") -> Text:
    """'0.85 [0.80..0.91]', green below one, red above; `without` for the row that the others are held against."""
    if ratio is None:
        return Text(without, style="dim")
    style = "red" if ratio["median"] is None or ratio["median"] > 1 else "green"
    median, q25, q75 = ("inf" if ratio[key] is None else f"{ratio[key]:.2f}" for key in ("median", "q25", "q75"))
    return Text(f"{median} [{q25}..{q75}]", style=style)


def plain_table(title: str, first: str, *numbers: str, second: str | None = None, notes: Sequence[str] = ()) -> Table:
    """A table with its first column, maybe a second one of words, and those of numbers; notes are below it.

    Narrow gaps: every table fits a terminal of 80 columns.
    """
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        min_width=min(len(title), MAX_WIDTH),  # a title is broken where its table ends
        caption=Text("\n".join(notes), style="dim") if notes else None,
        caption_justify="left",
    )
    table.add_column(first, overflow="fold", no_wrap=second is not None)
    if second is not None:
        table.add_column(second, overflow="fold")
    for heading in numbers:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table
