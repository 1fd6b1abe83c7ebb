"""Shared by all tables: the layout and the number format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from torchddp.harness.machine import date_text

MB = 1e6
MAX_WIDTH = 80


def number(value: float | None) -> str:
    """About three digits, without exponents."""
    if value is None:
        return "inf"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def adding_up(values: Sequence[float]) -> tuple[str, list[str]]:
    """The sum and its parts, rounded so that the printed parts add up: each is a difference of rounded sums."""
    total = sum(values)
    decimals = 0 if total >= 100 else 1 if total >= 10 else 2 if total >= 1 else 3
    ends = [round(sum(values[:count]), decimals) for count in range(len(values) + 1)]
    parts = [f"{end - begin:.{decimals}f}" for begin, end in zip(ends, ends[1:], strict=False)]
    return f"{ends[-1]:.{decimals}f}", parts


def counted(count: int, noun: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{count} {noun}{'s' if count > 1 else ''}"


def ranks_text(count: int) -> str:
    return counted(count, "rank")


def weight_text(result: dict[str, Any]) -> str:
    """The model, and the number and size of its gradients."""
    return f"{result['title']}: {result['parameters']} parameters, {result['gradient_bytes'] / MB:.3g} MB"


def ratio_sign(ratio: dict[str, Any]) -> int:
    """-1: significantly below one, 1: significantly above, 0: the median's 95% interval contains 1."""
    low, high = ratio["ci95_low"], ratio["ci95_high"]  # None: infinite
    return -1 if high is not None and high < 1 else 1 if low is None or low > 1 else 0


def ratio_text(ratio: dict[str, Any] | None, without: str = "1 (torch's best)") -> Text:
    """'0.85 [0.80..0.91]', green if significantly below one, red if significantly above. `without`: the text for the
    baseline's row."""
    if ratio is None:
        return Text(without, style="dim")
    style = {-1: "green", 0: "", 1: "red"}[ratio_sign(ratio)]
    median, q25, q75 = ("inf" if ratio[key] is None else f"{ratio[key]:.2f}" for key in ("median", "q25", "q75"))
    return Text(f"{median} [{q25}..{q75}]", style=style)


def plain_table(title: str, first: str, *numbers: str, second: str | None = None, notes: Sequence[str] = ()) -> Table:
    """A table with a first column, an optional second one of text, and columns of numbers; notes go below it. Gaps are
    narrow, so that every table fits 80 columns.
    """
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        min_width=min(len(title), MAX_WIDTH),  # a title wraps at its table's width
        caption=Text("\n".join(notes), style="dim") if notes else None,
        caption_justify="left",
    )
    table.add_column(first, overflow="fold", no_wrap=second is not None)
    if second is not None:
        table.add_column(second, overflow="fold")
    for heading in numbers:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


def origin(document: dict[str, Any]) -> Iterator[Text]:
    """When, where and by which command the results of a document were made."""
    machine = document["machine"]
    commit = (machine["git_commit"] or "no commit")[:12] + (" (changed)" if machine["git_dirty"] else "")
    date = f"{date_text(document['date'])} · " if "date" in document else ""
    yield Text(
        f"{date}{machine['cpu']}, {machine['cores']} cores, load {machine['load_average_1min']:g} · torch "
        f"{machine['torch']} · torchddp {machine['torchddp'] or 'not installed'} · {commit}",
        style="dim",
    )
    yield Text(document["command"], style="dim")
