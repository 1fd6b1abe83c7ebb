"""The case `collective`: single collectives over message sizes, torch's gloo beside the transports of torchddp."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text
from torch import Tensor

from torchddp.bench.cases import MAX_ROUNDS, BenchCase, Job, Settings
from torchddp.bench.collective_operations import (
    GLOO,
    IMPLEMENTATIONS,
    ITEM_BYTES,
    OPERATIONS,
    QUICK_SIZES_BYTES,
    SHM,
    SIZES_BYTES,
    Implementation,
    Operation,
    algbw_gb_per_s,
    attempt,
    busbw_gb_per_s,
    has_roofline,
    open_all,
    roofline_us,
    size_text,
    streamed_gb_per_s,
    verify,
    whole_numel,
)
from torchddp.bench.timing import agreed, enough, no_collections
from torchddp.harness.command import Display
from torchddp.harness.launch import Report
from torchddp.harness.plots import finish_panel, panels
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.tables import number, plain_table, ranks_text, ratio_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARMUP_ROUNDS = 3
# Rank 0 looks at the clock about so often in the time of one size; in between ranks meet in nothing but what is timed.
BATCHES = 8
# Calls before the timed one. Small ones are over while threads of gloo still run, in the next two or three too.
SMALL_BYTES = 64 * 1024
LEAD_IN, LEAD_IN_SMALL = 1, 4

CURVE_COLORS = dict(zip(IMPLEMENTATIONS, ("#9aa5b1", "#4c6ef5", "#d9480f"), strict=True))

Run = Callable[[], object]


def next_batch(rounds: int, elapsed_s: float, seconds: float) -> int:
    """How many more rounds before rank 0 decides again; 0 at the end."""
    if enough(rounds, elapsed_s, seconds):
        return 0
    if rounds == 0:
        return 1
    affordable = int(rounds / max(elapsed_s, 1e-9) * seconds / BATCHES)
    return min(max(affordable, 1), MAX_ROUNDS - rounds)


def one_round(runs: Sequence[Run], order: Sequence[int], lead_in: int = LEAD_IN) -> list[float]:
    """One timed call of each in the given order; times in us, by index.

    Each is called `lead_in` times before: the first call takes the ranks out of step with whatever ran before, and
    brings its own memory back into the caches.
    """
    times_us = [0.0] * len(runs)
    for index in order:
        run = runs[index]
        for _ in range(lead_in):
            run()
        start_ns = time.perf_counter_ns()
        run()
        times_us[index] = (time.perf_counter_ns() - start_ns) / 1e3
    return times_us


def timed_rounds(runs: Sequence[Run], seconds: float, seed: int, report: Report, lead_in: int = LEAD_IN) -> np.ndarray:
    """[run, round] of times in us on this rank. Every rank makes the same rounds in the same order."""
    shuffler = random.Random(seed)
    order = list(range(len(runs)))
    for _ in range(WARMUP_ROUNDS):
        one_round(runs, order, lead_in)
    rounds: list[list[float]] = []
    with no_collections():
        start_s = time.monotonic()
        while batch := agreed(next_batch(len(rounds), time.monotonic() - start_s, seconds)):
            for _ in range(batch):
                shuffler.shuffle(order)
                rounds.append(one_round(runs, order, lead_in))
            report(min(time.monotonic() - start_s, seconds), seconds)
    return np.array(rounds).T


def _allocate(implementation: Implementation, operation: Operation, numel: int, shard: int) -> tuple[Tensor, Tensor]:
    """The memory an operation reads and the memory it writes, which may be the same."""
    whole = implementation.allocate(numel)
    if not operation.sharded:
        return whole, whole
    part = implementation.allocate(shard)
    return (part, whole) if operation.name == "all_gather" else (whole, part)


def _time_size(
    job: Job, operation: Operation, size_bytes: int, implementations: Sequence[Implementation], report: Report
) -> dict[str, Any]:
    numel = whole_numel(size_bytes, job.world_size)
    checks: list[Run] = []
    runs: list[Run] = []
    names: list[str] = []
    reasons: dict[str, str] = {}
    for one in implementations:
        memory, reason = attempt(partial(_allocate, one, operation, numel, numel // job.world_size))
        if memory is None:
            reasons[one.name] = str(reason)
            continue
        names.append(one.name)
        runs.append(one.bind(operation.name, *memory))
        checks.append(partial(verify, one.name, operation.name, runs[-1], *memory))
    for check in checks:
        check()
    streams = has_roofline(operation, size_bytes, job.world_size)
    if streams:
        # A copy within this rank's own memory moves what an all-reduce in shared memory must: reads B, writes B.
        runs.append(partial(torch.zeros(numel).copy_, torch.zeros(numel)))
    lead_in = LEAD_IN_SMALL if size_bytes <= SMALL_BYTES else LEAD_IN
    times_us = timed_rounds(runs, job.seconds / len(job.sizes_bytes), job.seed, report, lead_in)
    for check in checks:
        check()
    copy_us: list[Any] = [None] * job.world_size
    if streams:
        dist.all_gather_object(copy_us, float(np.median(times_us[-1])))
    return {
        "bytes": numel * ITEM_BYTES,
        "unavailable": reasons,
        "names": names,
        "time_us": times_us[: len(names)],
        "memory_gb_per_s": streamed_gb_per_s(numel * ITEM_BYTES, copy_us) if streams else None,
    }


def time_operation(job: Job, name: str, report: Report) -> dict[str, Any]:
    """Times of one operation over all sizes, as rank 0's clock shows them."""
    implementations, reasons = open_all()
    count = len(job.sizes_bytes)
    sizes = []
    for index, size_bytes in enumerate(job.sizes_bytes):

        def report_size(done: float, total: float, index: int = index) -> None:
            report(index + done / total, count)

        sizes.append(_time_size(job, OPERATIONS[name], size_bytes, implementations, report_size))
    return {"operation": name, "unavailable": reasons, "sizes": sizes}


def _size_result(operation: Operation, size: dict[str, Any], world_size: int) -> dict[str, Any]:
    memory_gb_per_s = size["memory_gb_per_s"]
    least_us = None if memory_gb_per_s is None else roofline_us(size["bytes"], world_size, memory_gb_per_s)
    times_us: dict[str, np.ndarray] = dict(zip(size["names"], size["time_us"], strict=True))
    rows = []
    for name, time_us in times_us.items():
        summary = summarize(time_us)
        rows.append(
            {
                "name": name,
                "time_us": summary.to_dict(),
                "algbw_gb_per_s": algbw_gb_per_s(size["bytes"], summary.median),
                "busbw_gb_per_s": busbw_gb_per_s(operation, size["bytes"], summary.median, world_size),
                "ratio_to_gloo": None if name == GLOO else paired_ratio(time_us, times_us[GLOO]).to_dict(),
                "over_roofline": summary.median / least_us if least_us is not None and name == SHM else None,
            }
        )
    return {
        "bytes": size["bytes"],
        "rounds": int(size["time_us"].shape[1]),
        "memory_gb_per_s": memory_gb_per_s,
        "roofline_us": least_us,
        "unavailable": size["unavailable"],
        "implementations": rows,
    }


def collective_result(raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    operation = OPERATIONS[raw["operation"]]
    return {
        "case": "collective",
        "operation": operation.name,
        "world_size": world_size,
        "dtype": "float32",
        "unavailable": raw["unavailable"],
        "sizes": [_size_result(operation, size, world_size) for size in raw["sizes"]],
    }


def _notes(result: dict[str, Any]) -> list[str]:
    notes = [f"{name} not available: {reason}" for name, reason in result["unavailable"].items()]
    measured = []
    for size in result["sizes"]:
        text = size_text(size["bytes"])
        notes += [f"{name} not available at {text}: {reason}" for name, reason in size["unavailable"].items()]
        if size["memory_gb_per_s"] is not None:
            measured.append(f"{number(size['memory_gb_per_s'])} GB/s at {text}")
    if measured:
        notes.append(f"memory bandwidth, all ranks copying at once: {', '.join(measured)}")
    return notes


def _not_available(size: str, name: str) -> list[str | Text]:
    return [size, name, Text("not available", style="dim")]


def _cells(size: str, row: dict[str, Any]) -> list[str | Text]:
    over_roofline = row["over_roofline"]
    return [
        size,
        row["name"],
        number(row["time_us"]["median"]),
        number(row["time_us"]["p99"]),
        number(row["algbw_gb_per_s"]),
        number(row["busbw_gb_per_s"]),
        ratio_text(row["ratio_to_gloo"], without="1"),
        "" if over_roofline is None else f"{over_roofline:.2f}",
    ]


def collective_table(result: dict[str, Any]) -> Table:
    counts = sorted({size["rounds"] for size in result["sizes"]})
    rounds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
    title = f"collective · {result['operation']}, fp32, {ranks_text(result['world_size'])}, {rounds} rounds"
    headings = ["p50\nus", "p99\nus", "alg\nGB/s", "bus\nGB/s", "vs gloo\np50 [p25..p75]"]
    if any(size["roofline_us"] is not None for size in result["sizes"]):
        headings.append("x\nroof")
    table = plain_table(title, "size", *headings, second="", notes=_notes(result))
    for size in result["sizes"]:
        text = size_text(size["bytes"])
        for row in size["implementations"]:
            table.add_row(*_cells(text, row)[: len(table.columns)], style="" if row["name"] == GLOO else "bold")
            text = ""
        for name in size["unavailable"]:
            table.add_row(*_not_available(text, name))
        table.add_section()
    for name in result["unavailable"]:
        table.add_row(*_not_available("all", name))
    return table


def curve(result: dict[str, Any], name: str) -> tuple[list[int], list[float], list[float]]:
    """Message sizes in bytes, times in us and busbw in GB/s of one implementation."""
    points = [
        (size["bytes"], row["time_us"]["median"], row["busbw_gb_per_s"])
        for size in result["sizes"]
        for row in size["implementations"]
        if row["name"] == name
    ]
    return [p[0] for p in points], [p[1] for p in points], [p[2] for p in points]


def draw_curves(results: Sequence[dict[str, Any]]) -> Figure:
    """Time and busbw over message size, one row per operation."""
    figure, axes = panels(len(results), 2, 9.0, 3.2 * len(results))
    for row, result in zip(axes, results, strict=True):
        for name in IMPLEMENTATIONS:
            sizes, *values = curve(result, name)
            for axis, heights in zip(row, values, strict=True):
                if any(height > 0 for height in heights):
                    axis.plot(sizes, heights, marker="o", markersize=3, color=CURVE_COLORS[name], label=name)
        all_sizes = [size["bytes"] for size in result["sizes"]]
        for axis, label in zip(row, ("time p50, us", "busbw, GB/s"), strict=True):
            axis.set_xscale("log", base=4)
            axis.set_yscale("log")
            axis.set_xticks(all_sizes, [size_text(size) for size in all_sizes], rotation=45, fontsize=7)
            axis.minorticks_off()
            finish_panel(axis, f"{result['operation']}, {ranks_text(result['world_size'])}", "message size", label)
        row[0].legend(fontsize=8, frameon=False)
    return figure


def _course(case: BenchCase, settings: Settings, display: Display) -> list[dict[str, Any]]:
    sizes = QUICK_SIZES_BYTES if settings.quick else SIZES_BYTES
    job = replace(settings.job_of(case), variants=(), operations=settings.operations, sizes_bytes=sizes)
    display.start(case.name)
    return [collective_result(raw, job.world_size) for raw in case.launch(job, display)]


CASE = BenchCase(
    name="collective",
    title="single collectives over message sizes (no model: torch's gloo and our transports)",
    models=(),
    quick_models=(),
    unit="us",
    measure=time_operation,
    course=_course,
    table=collective_table,
    draw=draw_curves,
    note=(
        "collective: fp32, times of rank 0, each implementation in turn on memory of its own kind; with few rounds "
        "p99 is the slowest. GB/s from p50; bus as nccl-tests counts it; vs gloo per round. x roof: p50 over the time "
        "in which the same ranks, each copying within its own memory, move the bytes that an all-reduce in shared "
        "memory must."
    ),
)
