"""The printed tables, for a terminal and in markdown. Built from the document only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.training.tables import bytes_text, holds_text, markdown_table
from benchmarks.two_hosts.report import rate_text
from torchddp.harness.machine import origin
from torchddp.harness.tables import number, plain_table, ranks_text

HEADINGS = ("method", "steps to\nthe loss", "s a step", "s to\nthe loss", "torch DDP\n/ this", "sent a step\nby a host")
BOUND_HEADINGS = ("time to the loss, theirs / ours", "ours", "theirs", "ratio", "at least", "reached")


def heading(result: dict[str, Any]) -> str:
    """The table's title: the setup and the target loss."""
    return (
        f"{result['title']}: {result['parameters']:,} parameters, "
        f"two hosts with {ranks_text(result['ranks_per_host'])} each, "
        f"{rate_text(result['rate'])}, steps of {result['units_per_step']:,} {result['unit']}, to loss "
        f"{result['target']:.3f}"
    )


def cells(row: dict[str, Any]) -> list[str]:
    """A method's row, in the order of HEADINGS."""
    if "error" in row:
        return [row["name"], "error", "", "", "", ""]
    arrival = row["arrival"]
    steps, seconds = ("not reached", "") if arrival is None else (number(arrival["steps"]), number(arrival["seconds"]))
    speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}"
    sent = bytes_text(max(row["sent_bytes_per_step"]))
    return [row["name"], steps, number(row["step_s"]["median"]), seconds, speedup, sent]


def bound_cells(row: dict[str, Any]) -> list[str]:
    """A comparison's row, in the order of BOUND_HEADINGS."""
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    names = [row["ours"] or "none reached it", row["theirs"] or "none reached it"]
    return [row["title"], *names, ratio, f"{row['bound']:g}", holds_text(row["holds"])]


def methods_table(result: dict[str, Any]) -> Table:
    """Each method's time and steps to the loss."""
    table = plain_table(heading(result), HEADINGS[0])
    for name in HEADINGS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["methods"]:
        table.add_row(*map(Text, cells(row)))
    return table


def bounds_table(result: dict[str, Any]) -> Table:
    """Our bounds, and whether they hold."""
    table = plain_table("Bounds", BOUND_HEADINGS[0])
    for name in BOUND_HEADINGS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["comparisons"]:
        *rest, holds = bound_cells(row)
        table.add_row(*map(Text, rest), Text(holds, style="green" if row["holds"] else "red"))
    return table


def note(result: dict[str, Any]) -> Text:
    """Notes on how to read the numbers."""
    return Text(
        f"All methods train replicas of one model in one launch and take turns, {result['slice_steps']} steps each "
        f"(diloco {result['sync_every']}); only a method's own steps count toward its time. After each turn the loss "
        "is evaluated on a fixed held-out set, off the clock. The target is torch-ddp's loss after "
        f"{result['steps']} steps. s a step: median over turns. sent: on the link, headers and acknowledgements "
        "included, by the host that sends more.",
        style="dim",
    )


def _errors(result: dict[str, Any]) -> Iterable[Text]:
    for row in result["methods"]:
        if "error" in row:
            yield Text(f"{row['name']}: {row['error']}", style="red")


def _whats(result: dict[str, Any]) -> Iterable[Text]:
    yield Text("; ".join(f"{row['name']}: {row['what']}" for row in result["methods"]) + ".", style="dim")
    for row in result["comparisons"]:
        yield Text(f"{row['title']} >= {row['bound']:g}: {row['reason']}.", style="dim")


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    (result,) = document["results"]
    tables: list[RenderableType] = [methods_table(result), ""]
    if result["comparisons"]:
        tables += [bounds_table(result), ""]
    return Group(*tables, *_errors(result), note(result), *_whats(result), *origin(document))


def markdown(document: dict[str, Any]) -> str:
    """The tables for a documentation page, with the origin of their numbers."""
    (result,) = document["results"]
    flat = [name.replace("\n", " ") for name in HEADINGS]
    machine = document["machine"]
    made = f"`{document['command']}`, {document['date'][:10]}, {machine['cpu']}, {machine['cores']} cores"
    return "\n".join(
        [
            f"{heading(result)}:",
            "",
            markdown_table(flat, [cells(row) for row in result["methods"]]),
            "",
            markdown_table(BOUND_HEADINGS, [bound_cells(row) for row in result["comparisons"]]),
            "",
            f"Made by {made}, torch {machine['torch']}.",
        ]
    )
