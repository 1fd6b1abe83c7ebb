"""Formatting shared by both benchmarks. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_text(count: float | None) -> str:
    """'12.6 MB', '840 B'; '?' if unknown."""
    if count is None:
        return "?"
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def holds_text(holds: bool | None) -> str:
    """Whether a bound holds: yes or no; empty without a bound."""
    return "" if holds is None else "yes" if holds else "no"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table: the first column left-aligned, the others right-aligned."""
    lines = [list(headings), ["---", *["---:"] * (len(headings) - 1)], *map(list, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
