"""docs/migration.md, taken apart: its sections, the cells of its tables, its code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"


def sections() -> dict[str, str]:
    """Text by heading."""
    parts = PAGE.read_text().split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def rows(text: str) -> list[tuple[str, str]]:
    """The two cells of every row of every table, without heads."""
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return [(first, here) for first, here in cells if here != "here"]


def spans(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def code(text: str) -> str:
    """All indented blocks of a section, as one program."""
    lines = [line for line in text.splitlines() if line.startswith("    ") or not line.strip()]
    return textwrap.dedent("\n".join(lines))
