"""The case `recovery`: from `kill -9` of a rank to the next step of the others, without a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.table import Table

from benchmarks.options import whole_number
from torchddp.bench.cases import BenchCase, Option, Result, Settings
from torchddp.harness.command import Display
from torchddp.harness.launch import LaunchError
from torchddp.harness.plots import finish_panel, panels
from torchddp.harness.stats import summarize
from torchddp.harness.tables import number, plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLD_SIZES = (2, 3, 4)
TRANSPORTS = ("shm", "c10d")
PARTS = {"noticed": "error_s", "agreed": "known_s", "next step": "committed_s"}
DIE_AT = 20
TIMEOUT_S = 120.0


def trial(world_size: int, transport: str) -> dict[str, Any]:
    """Seconds from the kill until the last survivor has got so far; and how many steps were repeated."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.survivor", *map(str, (store.port, rank, world_size, transport, DIE_AT))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{world_size} ranks over {transport}: the survivors have not ended") from error
    finally:
        for rank in ranks:
            rank.kill()
    try:
        found = [json.loads(output) for output, _ in said[:-1]]
    except json.JSONDecodeError as error:
        raise LaunchError(f"{world_size} ranks over {transport}: a survivor failed:\n{said[0][1]}") from error
    times = {part: max(rank[key] - rank["died_s"] for rank in found) for part, key in PARTS.items()}
    return {**times, "repeated": max(rank["repeated"] for rank in found)}


def run(case: BenchCase, settings: Settings, display: Display) -> Iterator[Result]:
    options = settings.job_of(case).options
    display.start(case.name)
    rows = []
    for world_size in WORLD_SIZES:
        for transport in TRANSPORTS:
            trials = [trial(world_size, transport) for _ in range(options["trials"])]
            parts = {part: summarize([t[part] for t in trials]) for part in PARTS}
            longest, repeated = (max(t[key] for t in trials) for key in ("next step", "repeated"))
            about = {"world_size": world_size, "transport": transport, "trials": len(trials)}
            rows.append({**about, **parts, "longest": longest, "repeated": repeated})
    yield {"case": case.name, "title": case.title, "rows": rows}


def table(result: Result) -> Table:
    columns = (
        "ranks",
        "transport",
        "trials",
        *(f"{part}\ns" for part in PARTS),
        "next step\nmax, s",
        "steps\nrepeated",
    )
    found = plain_table(f"{result['case']} · {result['title']}", *columns)
    for row in result["rows"]:
        medians = (number(row[part]["median"]) for part in PARTS)
        before = f"{row['world_size']} → {row['world_size'] - 1}"
        most = number(row["longest"])
        found.add_row(before, row["transport"], str(row["trials"]), *medians, most, str(row["repeated"]))
    return found


def draw(results: Sequence[Result]) -> Figure:
    rows = results[0]["rows"]
    figure, (axes,) = panels(1, 1, 5.0, 3.0)
    names = [f"{row['world_size']} ranks, {row['transport']}" for row in rows]
    axes[0].barh(range(len(rows)), [row["next step"]["median"] for row in rows])
    axes[0].set_yticks(range(len(rows)), names)
    axes[0].invert_yaxis()
    finish_panel(axes[0], "from the kill to the next step", "s")
    return figure


CASE = BenchCase(
    name="recovery",
    title="kill -9 of a rank to the next step of the others",
    models=(),
    quick_models=(),
    caps_mb=(),
    takes_caps=False,
    unit="s",
    run=run,
    table=table,
    draw=draw,
    note=(
        "recovery: 1 MB of gradients; seconds from the kill until the last survivor has the error (noticed), knows who "
        "is left (agreed), and has done a step in the new group; medians. Repeated: steps that a survivor did twice."
    ),
    options={"trials": Option(15, whole_number(1, 10**4), "Trials per row. [default: 15]", quick=2)},
)
