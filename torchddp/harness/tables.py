"""Shared by all tables: the layout and the number format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchddp.harness.machine import date_text

# `import torchddp.profiler`, which needs the number format, must not need rich.
if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MB = 1e6
TABLE_WIDTH = 80


def number(value: float) -> str:
    """About three digits, without exponents."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def bytes_text(count: float | None) -> str:
    """'324 B', '65.5 kB', '25.2 MB'; '?' if unknown."""
    if count is None:
        return "?"
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.5 and unit != "TB":
        count, unit = count / 1000, next(units)
    return f"{count:.3g} {unit}"


def adding_up(values: Sequence[float]) -> tuple[str, list[str]]:
    """The sum and its parts, rounded so that the printed parts add up: each is a difference of rounded sums."""
    total = sum(values)
    decimals = 0 if total >= 100 else 1 if total >= 10 else 2 if total >= 1 else 3
    ends = [round(sum(values[:count]), decimals) for count in range(len(values) + 1)]
    parts = [f"{end - begin:.{decimals}f}" for begin, end in zip(ends, ends[1:], strict=False)]
    return f"{ends[-1]:.{decimals}f}", parts


def counted(count: int, noun: str) -> str:
    """'1 rank', '2 ranks'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ranks_text(count: int) -> str:
    return counted(count, "rank")


def is_known(ratio: dict[str, Any]) -> bool:
    """Whether the ratio and its spread make sense: with too much noise, a cost may be zero or less."""
    values = [ratio[key] for key in ("median", "q25", "q75", "ci95_low", "ci95_high")]
    return all(value is not None and value >= 0 for value in values)


def ratio_sign(ratio: dict[str, Any]) -> int:
    """-1: significantly below one, 1: significantly above, 0: the median's 95% interval contains 1, or is unknown."""
    if not is_known(ratio):
        return 0
    return -1 if ratio["ci95_high"] < 1 else 1 if ratio["ci95_low"] > 1 else 0


def interval_text(ratio: dict[str, Any]) -> str:
    if not is_known(ratio):
        return "95% interval unknown"
    return f"95% interval {ratio['ci95_low']:.2f} to {ratio['ci95_high']:.2f}"


def ratio_text(ratio: dict[str, Any] | None, without: str = "1 (torch's best)") -> Text:
    """The median with its 95% interval, '0.85 [0.80..0.91]': green if that lies below one, red if above.

    `without`: text for the baseline's row.
    """
    from rich.text import Text

    if ratio is None:
        return Text(without, style="dim")
    if not is_known(ratio):
        return Text("too noisy", style="yellow")
    style = {-1: "green", 0: "", 1: "red"}[ratio_sign(ratio)]
    return Text(f"{ratio['median']:.2f} [{ratio['ci95_low']:.2f}..{ratio['ci95_high']:.2f}]", style=style)


def plain_table(title: str, first: str, *numbers: str, second: str | None = None, notes: Sequence[str] = ()) -> Table:
    """A table of at most 80 columns: a first column, an optional second one of text, and numbers; notes go below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        min_width=min(len(title), TABLE_WIDTH),  # a title wraps at its table's width
        caption=Text("\n".join(notes), style="dim") if notes else None,
        caption_justify="left",
    )
    table.add_column(first, overflow="fold", no_wrap=second is not None)
    if second is not None:
        table.add_column(second, overflow="fold")
    for heading in numbers:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


def load_warning(machine: dict[str, Any]) -> list[str]:
    """One sentence if the machine was busy when a run started, or none."""
    if machine["load_average_1min"] <= machine["cores"] / 2:
        return []
    return ["Other programs were using the machine when the run started: expect wide spreads."]


def origin(document: dict[str, Any]) -> Iterator[Text]:
    from rich.text import Text

    machine = document["machine"]
    commit = (machine["git_commit"] or "no commit")[:12] + (" (changed)" if machine["git_dirty"] else "")
    date = f"{date_text(document['date'])} · " if "date" in document else ""
    yield Text(
        f"{date}{machine['cpu']}, {machine['cores']} cores, load {machine['load_average_1min']:g} · torch "
        f"{machine['torch']} · torchddp {machine['torchddp'] or 'not installed'} · {commit}",
        style="dim",
    )
    yield Text(document["command"], style="dim")
