"""Writes a self-contained HTML page of text, tables and plots, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.ours td { font-weight: 600; background: var(--soft); }
img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); }
.verdict { font-size: 1.1rem; font-weight: 600; }
footer, .note { opacity: .75; font-size: .9rem; }
"""


@dataclass(frozen=True)
class PageTable:
    """Rows of text under headings; the first column is left-aligned. `marked`: highlighted rows."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PagePlot:
    """A PNG and a description of what it shows."""

    png: bytes
    description: str


Block = str | PageTable | PagePlot


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables and plots."""

    title: str
    blocks: Sequence[Block]


def _plain(cell: Any) -> str:
    """The text of a heading or a cell, without the line breaks made for narrow columns."""
    text = cell.plain if isinstance(cell, Text) else str(cell)
    return text.replace("-\n", "").replace("\n", " ")


def page_table(table: Table) -> PageTable:
    """The same headings and rows as in the terminal, with bold rows marked."""
    return PageTable(
        headings=[_plain(column.header) for column in table.columns],
        rows=[list(row) for row in zip(*(map(_plain, column.cells) for column in table.columns), strict=True)],
        marked=frozenset(index for index, row in enumerate(table.rows) if row.style == "bold"),
    )


def table_blocks(table: Table) -> Iterable[Block]:
    """A terminal's table with its title above and its notes below."""
    yield _plain(table.title)
    yield page_table(table)
    if table.caption:
        yield from str(table.caption).splitlines()


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, PagePlot):
        data = base64.b64encode(block.png).decode()
        return f'<p><img alt="{html.escape(block.description)}" src="data:image/png;base64,{data}"></p>'
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in block.headings)
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in block.rows]
    rows = "".join(f"<tr{' class=ours' if i in block.marked else ''}>{row}</tr>" for i, row in enumerate(cells))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def make_page(
    title: str, sections: Sequence[Section], origin: Sequence[str], data: Any = None, *, verdict: str = ""
) -> str:
    """The page as text. `origin`: when, how and with what it was made; `data`: embedded in the page as JSON, for
    programs; `verdict`: the result in a sentence, below the title."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if verdict:
        parts.append(f'<p class="verdict">{html.escape(verdict)}</p>')
    for section in sections:
        parts += [f"<section><h2>{html.escape(section.title)}</h2>", *map(_block, section.blocks), "</section>"]
    parts.append(f"<footer>{''.join(f'<p>{html.escape(line)}</p>' for line in origin)}</footer>")
    if data is not None:
        # "</" must not end the element early.
        kept = json.dumps(data, allow_nan=False).replace("</", "<\\/")
        parts.append(f'<script type="application/json" id="data">{kept}</script>')
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def write_page(
    path: Path, title: str, sections: Sequence[Section], origin: Sequence[str], data: Any = None, *, verdict: str = ""
) -> None:
    path.write_text(make_page(title, sections, origin, data, verdict=verdict))
