"""A run as one HTML page: the tables of the terminal, the plots, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp.bench.cases import CASES
from torchddp.bench.plot import draw_plot
from torchddp.bench.report import NOTES, TABLES, TUNED_NOTE, case_names, origin, summaries, warnings
from torchddp.harness.page import Block, PagePlot, PageTable, Section, figure_png, write_page

TITLE = "torchddp bench"


def _plain(cell: Any) -> str:
    """The words of a heading or a cell, without line breaks made for narrow columns."""
    text = cell.plain if isinstance(cell, Text) else str(cell)
    return text.replace("-\n", "").replace("\n", " ")


def page_table(table: Table) -> PageTable:
    """The same headings and rows as in the terminal; the bold ones marked."""
    return PageTable(
        headings=[_plain(column.header) for column in table.columns],
        rows=[
            list(row)
            for row in zip(*([_plain(cell) for cell in column.cells] for column in table.columns), strict=True)
        ],
        marked=frozenset(index for index, row in enumerate(table.rows) if row.style == "bold"),
    )


def _table_blocks(table: Table) -> Iterable[Block]:
    yield _plain(table.title)
    yield page_table(table)
    if table.caption:
        yield from str(table.caption).splitlines()


def case_section(document: dict[str, Any], case: str) -> Section:
    """One case: its tables, its plot and what they mean."""
    results = [result for result in document["results"] if result["case"] == case]
    blocks: list[Block] = []
    for result in results:
        blocks += _table_blocks(TABLES[case](result))
    # The numbers of the tables above; who can't see the picture misses none.
    described = f"Plot of the case {case}: {', '.join(row_names(results))}"
    blocks += [PagePlot(figure_png(draw_plot(results)), described), NOTES[case]]
    if case != "collective":
        blocks.append(TUNED_NOTE)
    return Section(f"{case}: {CASES[case].title}", blocks)


def row_names(results: Iterable[dict[str, Any]]) -> list[str]:
    """What the plot compares, each once."""
    names: dict[str, None] = {}
    for result in results:
        for group in (result, *result.get("sizes", ())):
            rows = group.get("variants") or group.get("implementations") or ()
            names.update(dict.fromkeys(row["name"] for row in rows))
    return list(names)


def write_report(document: dict[str, Any], path: Path) -> None:
    """Write the page of a run's document; the document itself is kept in it, as JSON."""
    sections = [case_section(document, case) for case in case_names(document)]
    for table in summaries(document["results"]):
        sections.append(Section("Summary", list(_table_blocks(table))))
    if found := list(warnings(document)):
        sections.append(Section("Beware", found))
    machine = document["machine"]
    where = f"{document['date']} · {machine['system']} · Python {machine['python']}"
    write_page(path, TITLE, sections, [where, *map(str, origin(document))], document)
