"""The printed table. Built from the document only, so that a saved JSON gives the same table."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchddp.harness.machine import origin
from torchddp.harness.tables import number, plain_table

# We claim that int8 reaches at least this fraction of a copy's speed.
GOAL, GOAL_FORMAT = 0.5, "int8"


def bytes_text(nbytes: int) -> str:
    """'64 KiB', '1 MiB'."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:g} KiB"


def _ratio_text(kernel: dict[str, Any]) -> Text:
    ratio = kernel["to_memcpy"]
    if ratio is None:
        return Text("1", style="dim")
    style = "" if kernel["what"] != GOAL_FORMAT else "green" if ratio["median"] >= GOAL else "red"
    return Text(f"{ratio['median']:.2f} [{ratio['q25']:.2f}..{ratio['q75']:.2f}]", style=style)


def size_table(result: dict[str, Any]) -> Table:
    """One size: every kernel's speed and its ratio to the copy."""
    table = plain_table(f"{bytes_text(result['nbytes'])} of fp32, {result['rounds']} rounds", "kernel")
    for heading in ("", "GB/s of fp32", "speed / memcpy\np50 [p25..p75]"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for kernel in result["kernels"]:
        speed = number(kernel["gb_per_s"]["median"])
        table.add_row(kernel["what"], kernel["how"], speed, _ratio_text(kernel))
    return table


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = []
    for result in document["results"]:
        parts += [size_table(result), ""]
    note = f"One core, {document['settings']['cpu_capability']} kernels. Speeds count only the fp32 bytes."
    return Group(*parts, Text(note), *origin(document))
