"""Reports a profile's numbers as text of at most 80 columns."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from torchddp.harness.tables import adding_up, bytes_text, counted, number, plain_table, ranks_text
from torchddp.profiler.numbers import held_back_by
from torchddp.profiler.ranks import SIGNIFICANCE, chance_to_be_last
from torchddp.traffic import OUTER, Traffic, total_wire_bytes

WIDTH = 80
UNITS = "Times are in ms since the first rank began forward."
FOOTNOTE = (
    f"{UNITS} launched: by the last rank. done: when the rank saw that the reduction had ended; it looks at the "
    "buckets in order."
)
SHOWN = ("first_ready_us", "last_ready_us", "launched_us", "done_us")
Numbers = Mapping[str, Any]


def as_text(renderable: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def ms(time_us: float | None) -> str:
    return "" if time_us is None else number(time_us / 1e3)


def report(found: Numbers) -> RenderableType:
    table = plain_table(title(found), *columns(found))
    table.columns[0].justify = "right"
    table.columns[-1].justify, table.columns[-1].no_wrap, table.columns[-1].overflow = "left", False, "fold"
    for row in bucket_rows(found):
        table.add_row(*map(Text, row))  # a name must not be read as markup
    return Group(table, "", *map(Text, (*headline(found), *notes(found))), Text(FOOTNOTE, style="dim"))


def title(found: Numbers) -> str:
    one, of = found["world_size"] == 1, f"(median of the {found['steps_recorded']} recorded)"
    whose = f" of rank {found['slowest_rank']}" if one else ""
    return f"Step {found['step']}{whose} {of}" + ("" if one else f", {ranks_text(found['world_size'])}")


def columns(found: Numbers) -> list[str]:
    several = ["last\nrank", "others\nwaited"] if found["world_size"] > 1 else []
    times = [name.removesuffix("_us").replace("_", "\n") for name in SHOWN]
    return ["bucket", "size", *times, *several, "held back by"]


def bucket_rows(found: Numbers) -> list[list[str]]:
    rows = []
    for bucket in found["buckets"]:
        cells = [str(bucket["bucket"]), bytes_text(bucket["bytes"])]
        cells += [ms(bucket[name]) for name in SHOWN]
        if found["world_size"] > 1:
            sent = bucket["last_rank"] is not None
            cells += (
                [str(bucket["last_rank"]), ms(bucket["wait_us"]) if bucket["wait_us"] else "0"] if sent else ["", ""]
            )
        rows.append([*cells, held_back_by(bucket)])
    return rows


def headline(found: Numbers) -> list[str]:
    """Where the step's time went on the slowest rank. The printed parts add up to the printed sums."""
    step_parts = [found[name] / 1e3 for name in ("forward_us", "backward_us", "exposed_us")]
    total, (forward, backward, exposed) = adding_up(step_parts)
    which = f" (rank {found['slowest_rank']}, slowest)" if found["world_size"] > 1 else ""
    lines = [f"step {total} ms{which} = forward {forward} + backward {backward} + exposed {exposed}"]
    if found["comm_us"]:
        decimals = len(total.partition(".")[2])
        hidden = f"{found['hidden_us'] / 1e3:.{decimals}f}"
        comm = f"{float(hidden) + float(exposed):.{decimals}f}"
        lines.append(f"communication {comm} ms = hidden behind backward {hidden} + exposed {exposed}")
        if found["world_size"] > 1:
            waited = f"{min(found['wait_for_ranks_us'] / 1e3, float(exposed)):.{decimals}f}"
            sending = f"{float(exposed) - float(waited):.{decimals}f}"
            lines.append(f"exposed {exposed} ms = waiting for a later rank {waited} + sending {sending}")
        lines.append(f"overlap {found['overlap_ratio']:.0%}: the hidden share of the communication")
    return lines


def notes(found: Numbers) -> Iterator[str]:
    sent = [{route: Traffic(**each) for route, each in traffic.items()} for traffic in found["traffic"]]
    most = max(range(len(sent)), key=lambda place: total_wire_bytes(sent[place]) or 0)
    of_rank = f", by rank {found['ranks'][most]['rank']}" if any(each != sent[most] for each in sent) else ""
    yield f"sent per step{of_rank}: {sent_text(sent[most])}"
    if found["world_size"] > 1:
        yield from _straggler_lines(found)
    if found["clocks"] > 1:
        worst_us = max(found["clock_uncertainty_us"])
        yield f"clocks of different hosts aligned to within {worst_us:.0f} us: ignore shorter waits between them"
    for rank, dropped, partial in zip(found["ranks"], found["events_dropped"], found["steps_incomplete"], strict=True):
        if dropped:
            lost = f"{counted(dropped, 'event')} of earlier steps overwritten (profile(model, steps=N) keeps N)"
            yield f"rank {rank['rank']}: {lost}"
        if partial:
            yield f"rank {rank['rank']}: {counted(partial, 'step')} recorded only in part and left out"


def sent_text(traffic: Mapping[str, Traffic]) -> str:
    """'25.2 MB as gradients, 12.6 MB on the wire (shm)', or 'nothing'."""
    if not traffic:
        return "nothing"
    given = sum(each.payload_bytes for route, each in traffic.items() if route != OUTER)
    shown = {OUTER: "to other hosts"}
    sent = [f"{bytes_text(each.wire_bytes)} on the wire ({shown.get(route, route)})" for route, each in traffic.items()]
    return ", ".join([f"{bytes_text(given)} as gradients", *sent])


def _straggler_lines(found: Numbers) -> Iterator[str]:
    last, straggler = found["last_rank"], found["straggler"]
    if last is None:
        yield "straggler: none, no rank waited for another"
        return
    p_text = "< 0.001" if last["p_value"] < 0.001 else f"= {last['p_value']:.2g}"
    often = f"rank {last['rank']} was last in {last['steps']} of {counted(last['of'], 'step')} with waits (p {p_text})"
    waited = f"on average, each other rank waited {ms(last['wait_us'])} ms per step for it"
    if straggler is not None:
        yield f"straggler: {often}; {waited}"
        yield f"in step {straggler['step']} {_where_text(straggler)}"
    elif last["p_value"] < SIGNIFICANCE:
        yield f"straggler: none that matters; {often}, but {waited}, {last['share']:.1%} of a step"
    elif chance_to_be_last(last["of"], last["of"], found["world_size"]) >= SIGNIFICANCE:
        yield f"straggler: too few steps to tell; {often}"
    else:
        yield f"straggler: none; {often}, which may be chance"


def _where_text(straggler: Numbers) -> str:
    lost = f"{ms(straggler['lost_us'])} ms"
    # A wait that no single place explains has many small causes: naming one of them would mislead.
    if 2 * straggler["lost_us"] < straggler["wait_us"]:
        return f"it was slower throughout: it lost no more than {lost} in any one place"
    places = {
        "start": f"it began forward {lost} after the fastest rank",
        "forward": f"it lost {lost} before its first gradient",
        "backward": f"it lost {lost} before the gradient of {straggler['parameter']}",
    }
    return places[straggler["where"]]
