"""The sections, table cells and code spans of docs/migration.md."""

from __future__ import annotations

import re

from tests.pages import DOCS

PAGE = DOCS / "migration.md"


def sections() -> dict[str, str]:
    """Text by heading."""
    parts = PAGE.read_text().split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def rows(text: str) -> list[tuple[str, str]]:
    """The two cells of every table row, without headings."""
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return [(first, here) for first, here in cells if here != "here"]


def spans(text: str) -> list[str]:
    """The text of the code spans."""
    return re.findall(r"`([^`]+)`", text)
