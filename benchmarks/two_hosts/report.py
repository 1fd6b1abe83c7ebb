"""The printed table. Built from the document only, so that a saved JSON gives the same table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchddp.bench.gradients import goal_text, our_row
from torchddp.harness.machine import origin
from torchddp.harness.tables import MB, number, plain_table, ratio_text, size_text


def rate_text(rate: int) -> str:
    """'1 Gbit/s'."""
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def _megabytes(count: float) -> str:
    return f"{count / MB:.{0 if count >= 100 * MB else 1}f}"


def model_table(result: dict[str, Any]) -> Table:
    """One model: each variant's step time, added time, bytes sent and ratio to torch's best."""
    table = plain_table(f"two hosts · {size_text(result)}, {result['rounds']} rounds", "variant")
    for heading in ("step p50\nms", "step\np90", "exposed\nms", "sent, MB\nby host"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(Text("step to torch's\nbest [p25..p75]"), justify="right", no_wrap=True)
    for row in result["variants"]:
        step, wrapped = row["step_ms"], "cost" in row
        table.add_row(
            row["name"],
            number(step["median"]),
            number(step["p90"]),
            number(row["cost"]["median"]) if wrapped else "",
            ", ".join(map(_megabytes, row["sent_bytes"])),
            ratio_text(row["ratio_to_best_torch"]) if wrapped else "",
            style="bold" if row["role"] == "ours" else "",
        )
    return table


def _crossings(result: dict[str, Any], row: dict[str, Any]) -> str:
    # For the busier host, because the step waits for it.
    return f"{max(row['sent_bytes']) / result['gradient_bytes']:.2f} x"


def verdict(result: dict[str, Any]) -> Text:
    """Our ratio to torch's best, compared with our bound, and how often each byte crosses the link."""
    ours = our_row(result)
    best = next(row for row in result["variants"] if row["name"] == result["best_torch"])
    transport = f"transport {result['transport']} · " if result["transport"] else ""
    return Text.assemble(
        f"{ours['name']} / {best['name']}: ",
        ratio_text(ours["ratio_to_best_torch"]),
        ", goal ",
        goal_text(result),
        f"\n{transport}sent by a host: ours {_crossings(result, ours)} the gradients, ",
        f"torch's best {_crossings(result, best)}",
    )


def footnotes(document: dict[str, Any]) -> Iterable[Text]:
    """Notes on how to read the numbers."""
    machine, rate = document["machine"], document["settings"]["rate"]
    yield Text(
        f"Two network namespaces with two ranks each, joined by a link of {rate_text(rate)} each way. tuned: "
        "gradient_as_bucket_view, batched_grad_copy, static_graph, and the given bucket_cap_mb. exposed: the step "
        "minus a nearby step without DDP. Ratios are of whole steps, per round. sent: bytes that each host sent over "
        "the link in one step, headers and acknowledgements included.",
        style="dim",
    )
    yield from origin(document)
    ranks = max(result["world_size"] for result in document["results"])
    if machine["cores"] < ranks:
        yield Text(
            f"{ranks} ranks share {machine['cores']} cores: computation takes longer than on two real hosts.",
            style="yellow",
        )
    if machine["load_average_1min"] > machine["cores"] / 2:
        yield Text("Other programs were using the machine when the run started: expect wide spreads.", style="yellow")


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = []
    for result in document["results"]:
        parts += [model_table(result), verdict(result), ""]
    return Group(*parts, *footnotes(document))
