"""The case `recovery`: from `kill -9` of a rank to the next step of the others: in the same processes, restarted by
torchrun, and under torchft, if it is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.table import Table

from benchmarks.chaos.lighthouse import lighthouse
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
PARTS = {"noticed": "noticed", "agreed": "agreed", "next step": "committed"}
DIE_AT = 25
TIMEOUT_S = 120.0
RANKS = "benchmarks.recovery"

Children = list[subprocess.Popen[str]]


def python(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RUST_LOG": "error", **variables},
    )


@contextlib.contextmanager
def survivors(port: int, ranks: int, transport: str) -> Iterator[Children]:
    yield [python(f"{RANKS}.survivor", port, rank, ranks, DIE_AT, transport) for rank in range(ranks)]


@contextlib.contextmanager
def torchrun(port: int, ranks: int) -> Iterator[Children]:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--max-restarts", 1)
    with tempfile.TemporaryDirectory() as folder:
        yield [python(*launcher, "-m", f"{RANKS}.restarted", port, DIE_AT, folder)]


@contextlib.contextmanager
def torchft(port: int, ranks: int) -> Iterator[Children]:
    with lighthouse() as address:
        place = {"TORCHFT_LIGHTHOUSE": address}
        yield [python(f"{RANKS}.replica", port, rank, ranks, DIE_AT, **place) for rank in range(ranks)]


WAYS: dict[str, Callable[[int, int], AbstractContextManager[Children]]] = {
    "survivors, shm": partial(survivors, transport="shm"),
    "survivors, c10d": partial(survivors, transport="c10d"),
    "torchrun": torchrun,
    **({"torchft": torchft} if importlib.util.find_spec("torchft") else {}),
}


def trial(way: str, ranks: int) -> dict[str, float]:
    """Seconds from the kill until the last rank has got so far, as far as known; and how many steps were repeated."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with WAYS[way](store.port, ranks) as children:
        try:
            said = [child.communicate(timeout=TIMEOUT_S) for child in children]
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"{way}: of {ranks} ranks, not all have ended") from error
        finally:
            for child in children:
                child.terminate()  # not SIGKILL: torchrun ends its ranks
            for child in children:
                child.wait(TIMEOUT_S)
    found = [json.loads(line) for output, _ in said for line in output.splitlines() if line.startswith("{")]
    if len(found) < ranks - 1:
        raise LaunchError(f"{way}: of {ranks} ranks, {len(found)} went on:\n" + "\n".join(errors for _, errors in said))
    return {key: max(rank[key] for rank in found) for key in found[0]}


def run(case: BenchCase, settings: Settings, display: Display) -> Iterator[Result]:
    options = settings.job_of(case).options
    display.start(case.name)
    rows = []
    for world_size in WORLD_SIZES:
        for way in WAYS:
            trials = [trial(way, world_size) for _ in range(options["trials"])]
            parts = {part: summarize([t[key] for t in trials]) for part, key in PARTS.items() if key in trials[0]}
            longest, repeated = (max(t[key] for t in trials) for key in ("committed", "repeated"))
            about = {"world_size": world_size, "way": way, "trials": len(trials)}
            rows.append({**about, **parts, "longest": longest, "repeated": repeated})
    yield {"case": case.name, "title": case.title, "rows": rows}


def table(result: Result) -> Table:
    columns = (
        "ranks",
        "way",
        "trials",
        *(f"{part}\ns" for part in PARTS),
        "next step\nmax, s",
        "steps\nrepeated",
    )
    found = plain_table(f"{result['case']} · {result['title']}", *columns)
    for row in result["rows"]:
        medians = (number(row[part]["median"]) if part in row else "" for part in PARTS)
        before = f"{row['world_size']} → {row['world_size'] - 1}"
        most = number(row["longest"])
        found.add_row(before, row["way"], str(row["trials"]), *medians, most, str(row["repeated"]))
    return found


def draw(results: Sequence[Result]) -> Figure:
    rows = results[0]["rows"]
    figure, (axes,) = panels(1, 1, 5.0, 3.0)
    names = [f"{row['world_size']} ranks, {row['way']}" for row in rows]
    axes[0].barh(range(len(rows)), [row["next step"]["median"] for row in rows])
    axes[0].set_yticks(range(len(rows)), names)
    axes[0].invert_yaxis()
    finish_panel(axes[0], "from the kill to the next step", "s")
    return figure


CASE = BenchCase(
    name="recovery",
    title="kill -9 of a rank to the next step of the others",
    models=(),
    caps_mb=(),
    takes_caps=False,
    unit="s",
    run=run,
    table=table,
    draw=draw,
    note=(
        "recovery: 1 MB of gradients; seconds from the kill until the last rank has the error (noticed), knows who is "
        "left (agreed), and has done the next step; medians. torchrun restarts all ranks from the last checkpoint, of "
        "every 10th step; under torchft each rank is a replica. Repeated: steps that a rank did twice."
    ),
    options={"trials": Option(15, whole_number(1, 10**4), "Trials per row. [default: 15]", quick=2)},
)
