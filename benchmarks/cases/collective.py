"""The case `collective`: single collectives by message size, of gloo, torchddp, and MPICH where it is installed."""

from __future__ import annotations

import importlib.util
import mmap
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.options import one_of, several, whole_number
from torchddp.bench.cases import BenchCase, Job, Option, Result, Settings
from torchddp.bench.timing import gathered, over_ranks, timed_rounds, warm_up
from torchddp.harness.command import Display
from torchddp.harness.launch import THIS_HOST, Place, Report
from torchddp.harness.machine import available_cores
from torchddp.harness.plots import finish_panel, panels
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.tables import number, plain_table, ranks_text, ratio_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ITEM_BYTES = 4  # fp32
# 64 B to 64 MB, in factors of four.
SIZES_BYTES = tuple(64 * 4**step for step in range(11))
# Bus bandwidth over bytes per second, by ranks, as defined by nccl-tests: it is comparable across numbers of ranks.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
}
# The plot's colors by row; ours are warm and drawn last.
COLORS = {"gloo": "#9aa5b1", "mpich": "#2f9e44", "c10d": "#4c6ef5", "shm": "#d9480f", "torchddp_shm": "#f59f00"}
OURS = ("c10d", "shm", "torchddp_shm")
Run = Callable[[], object]

# --- where MPI works -------------------------------------------------------------------------------------------------

# MPICH's launcher starts a placeholder per rank, which prints how to reach the launcher, and lives as long as this
# process.
PLACEHOLDER = "echo $PMI_PORT; exec tail --pid=$0 -f /dev/null"
START_TIMEOUT_S = 60.0


@contextmanager
def open_place(world_size: int) -> Iterator[Place]:
    """This host, with ranks that MPICH takes for those that its launcher has started, if it is installed."""
    launcher = shutil.which("mpiexec.hydra", path=f"{sys.prefix}/bin") or shutil.which("mpiexec.hydra")
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        yield THIS_HOST
        return
    command = [launcher, "-pmi-port", "-n", str(world_size), "sh", "-c", PLACEHOLDER, str(os.getpid())]
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    # In its own session, so that Ctrl-C reaches only this process.
    with subprocess.Popen(
        command, stdin=nothing, stdout=pipe, stderr=nothing, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            answers = select.select([process.stdout], [], [], START_TIMEOUT_S)[0]
            port = process.stdout.readline().strip() if answers else ""
            yield Place({"PMI_PORT": port}) if port else THIS_HOST  # MPI then finds one rank, and its row says so
        finally:
            process.terminate()


# --- what is timed ---------------------------------------------------------------------------------------------------


class Library(NamedTuple):
    """How one row allocates a message, and binds each operation to an input and an output, or to one in place."""

    allocate: Callable[[int], Tensor]
    bind: Callable[[Tensor, Tensor], dict[str, Run]]


def root_of(world_size: int) -> int:
    """The rank that broadcasts: not rank 0, whose times are reported, so that they include the arrival of the data."""
    return world_size - 1


def functions(backend: str) -> Library:
    """torch.distributed's functions, as programs call them."""
    group = dist.group.WORLD if dist.get_backend() == backend else dist.new_group(backend=backend)
    # torch 2.13 renamed two collectives. The old names still work but warn in every call.
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    root = root_of(dist.get_world_size())
    return Library(
        torch.empty,
        lambda source, target: {
            "all_reduce": partial(dist.all_reduce, target, group=group),
            "broadcast": partial(dist.broadcast, target, root, group=group),
            "all_gather": partial(all_gather, target, source, group=group),
            "reduce_scatter": partial(reduce_scatter, target, source, group=group),
        },
    )


def transport(choice: str) -> Library:
    """A transport of torchddp, on memory that it allocated, as for gradient buckets."""
    from torchddp.transport.select import open_transport

    group = dist.group.WORLD
    assert group is not None
    opened = open_transport(choice, group)
    work, root = opened.make_work(), root_of(opened.size)
    return Library(
        lambda numel: opened.allocate(numel, torch.empty(0)),
        lambda source, target: {
            "all_reduce": partial(opened.all_reduce, target, work, True),
            "broadcast": partial(opened.broadcast, target, root, work, True),
            "all_gather": partial(opened.all_gather, target, source, work, True),
            "reduce_scatter": partial(opened.reduce_scatter, target, source, work, True),
        },
    )


def mpich() -> Library:
    if importlib.util.find_spec("mpi4py") is None:
        raise RuntimeError("pip install mpi4py mpich")
    os.environ.update(PMI_ID=str(dist.get_rank()))  # as the launcher sets it for its own ranks
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != dist.get_world_size():
        raise RuntimeError(f"{MPI.Get_library_version().splitlines()[0]} found {world.size} ranks")

    def bind(source: Tensor, target: Tensor) -> dict[str, Run]:
        given, result = [source.numpy(), MPI.FLOAT], [target.numpy(), MPI.FLOAT]
        return {
            "all_reduce": partial(world.Allreduce, MPI.IN_PLACE, result),
            "broadcast": partial(world.Bcast, result, root_of(world.size)),
            "all_gather": partial(world.Allgather, given, result),
            "reduce_scatter": partial(world.Reduce_scatter_block, given, result),
        }

    return Library(torch.empty, bind)


LIBRARIES: dict[str, Callable[[], Library]] = {
    "gloo": partial(functions, "gloo"),
    "mpich": mpich,
    "c10d": partial(transport, "c10d"),
    "shm": partial(transport, "shm"),
    "torchddp_shm": partial(functions, "torchddp_shm"),
}


def open_libraries() -> tuple[dict[str, Library], dict[str, str]]:
    """Collective: the libraries that open on every rank, and why the others don't."""
    opened: dict[str, Library] = {}
    reasons: dict[str, str] = {}
    for name, make in LIBRARIES.items():
        reason = ""
        try:
            opened[name] = make()
        except Exception as error:  # such as a library that does not load
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        if found := next(filter(None, gathered(reason)), ""):
            opened.pop(name, None)
            reasons[name] = found
    return opened, reasons


# --- checks of results -----------------------------------------------------------------------------------------------

# A prime, so that a misplaced block of 2^n elements shows. Sums over 64 ranks are exact in fp32.
PERIOD = 251


class WrongResultError(RuntimeError):
    """A library computed a wrong result, so its time is meaningless."""


def stamp(rank: int, numel: int) -> Tensor:
    """The input of one rank: a different multiple for each, so that one added twice and another not at all shows."""
    return (torch.arange(PERIOD) * (rank + 1) % PERIOD).float().repeat(-(-numel // PERIOD))[:numel]


own_stamp = lru_cache(maxsize=1)(stamp)  # all trials of a size copy their input from it


def expected(operation: str, rank: int, world_size: int, numel: int) -> Tensor:
    """The output of one rank for stamped inputs; `numel` counts the whole message."""
    if operation == "broadcast":
        return stamp(root_of(world_size), numel)
    if operation == "all_gather":
        return torch.cat([stamp(source, numel // world_size) for source in range(world_size)])
    total = sum((stamp(source, numel) for source in range(world_size)), torch.zeros(numel))
    return total.chunk(world_size)[rank] if operation == "reduce_scatter" else total


# --- the timed calls -------------------------------------------------------------------------------------------------

# Untimed calls before each timed one, for code and memory in the caches. gloo's threads are still busy two or three
# small calls later.
SMALL_BYTES = 64 * 1024
LEAD_IN, LEAD_IN_SMALL = 1, 4
# How often rank 0 checks the clock at each size. In between, ranks communicate only in timed calls.
BATCHES = 8
LINE_BYTES = 64
# Polls between two yields. A yield takes several times as long as a poll, and ranks should leave together.
YIELD_EVERY = 50


class Barrier:
    """A spinning barrier of this host's ranks, who leave it within tenths of a microsecond of each other."""

    def __init__(self) -> None:
        self._rank, size = dist.get_rank(), dist.get_world_size()
        path: list[Any] = [None]
        if self._rank == 0:  # without a name, so that nothing is left behind, however the ranks end
            descriptor = os.memfd_create("torchddp-barrier")
            os.ftruncate(descriptor, size * LINE_BYTES)
            path = [f"/proc/{os.getpid()}/fd/{descriptor}"]
        dist.broadcast_object_list(path)
        with open(path[0], "r+b") as file:
            words = memoryview(mmap.mmap(file.fileno(), size * LINE_BYTES)).cast("q")
        self._counts = words[:: LINE_BYTES // words.itemsize]  # each in a cache line of its own
        self._others = [other for other in range(size) if other != self._rank]
        dist.barrier()

    def __call__(self) -> None:
        counts = self._counts
        counts[self._rank] = count = counts[self._rank] + 1
        for other in self._others:
            polls = 0
            while counts[other] < count:
                polls += 1
                if polls % YIELD_EVERY == 0:
                    os.sched_yield()


class Trial:
    """One library's collective on one message. All ranks start each call together, after a `barrier`."""

    def __init__(self, name: str, library: Library, operation: str, numel: int, barrier: Run) -> None:
        self.name, self._operation, self._numel, self._barrier = name, operation, numel, barrier
        rank, world_size = dist.get_rank(), dist.get_world_size()
        source = self._target = library.allocate(numel)
        if operation == "all_gather":
            source = library.allocate(numel // world_size)
        elif operation == "reduce_scatter":
            self._target = library.allocate(numel // world_size)
        self._run = library.bind(source, self._target)[operation]
        # numpy, because torch takes longer to copy a small tensor than an all-reduce takes.
        self._source, self._input = source.numpy(), own_stamp(rank, source.numel()).numpy()
        self._lead_in = LEAD_IN_SMALL if numel * ITEM_BYTES <= SMALL_BYTES else LEAD_IN

    def step(self, batch: None = None, world_size: int = 1) -> float:
        """The time in us of one call on an input that this rank has just written."""
        for _ in range(self._lead_in):
            self._source[:] = self._input
            self._run()
        self._source[:] = self._input
        self._barrier()
        start_ns = time.perf_counter_ns()
        self._run()
        return (time.perf_counter_ns() - start_ns) / 1e3

    def check(self) -> None:
        self._target.fill_(-1)
        self._source[:] = self._input
        self._run()
        right = expected(self._operation, dist.get_rank(), dist.get_world_size(), self._numel)
        wrong = (self._target != right).nonzero()
        if len(wrong):
            raise WrongResultError(
                f"{self._operation} of '{self.name}' on rank {dist.get_rank()}: {len(wrong)} of {len(self._target)} "
                f"elements are wrong, the first at index {int(wrong[0])} with value {float(self._target[wrong[0]])!r}"
            )


def measure(job: Job, operation: str, report: Report) -> dict[str, Any]:
    """Collective: time one operation at all sizes, on rank 0 and on the slowest rank of each round."""
    barrier = Barrier()
    libraries, reasons = open_libraries()
    sizes_bytes = job.options["sizes"]
    share = replace(job, seconds=job.seconds / len(sizes_bytes))
    sizes: list[dict[str, Any]] = []
    for size_bytes in sizes_bytes:
        numel = max(size_bytes // ITEM_BYTES // job.world_size, 1) * job.world_size  # equal shards
        trials = [Trial(name, library, operation, numel, barrier) for name, library in libraries.items()]
        for trial in trials:
            trial.check()
        warm_up(trials, None, share)
        times_us = timed_rounds(
            trials, None, share, lambda done, total: report(len(sizes) + done / total, len(sizes_bytes)), BATCHES
        )
        for trial in trials:
            trial.check()
        sizes.append({"bytes": numel * ITEM_BYTES, "time_us": times_us, "slowest_us": over_ranks(times_us)})
    return {
        "operation": operation,
        "processors": available_cores(),
        "unavailable": reasons,
        "names": [*libraries],
        "sizes": sizes,
    }


# --- results ---------------------------------------------------------------------------------------------------------


def size_result(raw: dict[str, Any], names: Sequence[str], operation: str, world_size: int) -> dict[str, Any]:
    times_us = dict(zip(names, raw["time_us"], strict=True))
    summaries = {name: summarize(time_us) for name, time_us in times_us.items()}
    # It is chosen by the numbers that are then reported, which favors it.
    best = min((name for name in names if name not in OURS), key=lambda name: summaries[name]["median"])
    rows = [
        {
            "name": name,
            "time_us": summaries[name],
            "slowest_rank_us": summarize(slowest_us),
            "busbw_gb_per_s": raw["bytes"] / summaries[name]["median"] / 1e3 * BUS_FACTORS[operation](world_size),
            "best_peer_ratio": paired_ratio(times_us[name], times_us[best]).to_dict() if name in OURS else None,
        }
        for name, slowest_us in zip(names, raw["slowest_us"], strict=True)
    ]
    return {"bytes": raw["bytes"], "rounds": int(raw["time_us"].shape[1]), "best_peer": best, "implementations": rows}


def collective_result(raw: dict[str, Any], world_size: int) -> Result:
    sizes = [size_result(size, raw["names"], raw["operation"], world_size) for size in raw["sizes"]]
    about = {key: raw[key] for key in ("operation", "processors", "unavailable")}
    return {"case": "collective", "world_size": world_size, "dtype": "float32", **about, "sizes": sizes}


def run(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    job = settings.job_of(case)
    display.start(case.name)
    with open_place(job.world_size) as place:
        raws = case.launch(replace(job, models=job.options["op"]), display, place)
    return [collective_result(raw, job.world_size) for raw in raws]


def size_text(size_bytes: int) -> str:
    """'1 KB', '256 MB', in powers of 1024, as is usual for message sizes."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    return f"{size_bytes / 1024:.3g} KB" if round(size_bytes / 1024) < 1024 else f"{size_bytes / 1024**2:.3g} MB"


def collective_table(result: Result) -> Table:
    counts = sorted({size["rounds"] for size in result["sizes"]})
    rounds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
    title = f"collective · {result['operation']}, fp32, {ranks_text(result['world_size'])}, {rounds} rounds"
    notes = [f"{name} not available: {reason}" for name, reason in result["unavailable"].items()]
    if result["world_size"] > result["processors"]:
        notes.append(f"{result['world_size']} ranks share {result['processors']} processors")
    headings = ("p50\nus", "p99\nus", "slow\np50", "bus\nGB/s", "vs best peer\np50 [95% CI]")
    table = plain_table(title, "size", *headings, second="", notes=notes)
    for size in result["sizes"]:
        text = size_text(size["bytes"])
        for row in size["implementations"]:
            times = (row["time_us"]["median"], row["time_us"]["p99"], row["slowest_rank_us"]["median"])
            without = "1 (best peer)" if row["name"] == size["best_peer"] else ""
            numbers = map(number, (*times, row["busbw_gb_per_s"]))
            ratio = ratio_text(row["best_peer_ratio"], without)
            table.add_row(text, row["name"], *numbers, ratio, style="bold" if row["name"] in OURS else "")
            text = ""
        table.add_section()
    return table


def draw(results: Sequence[Result]) -> Figure:
    """Time and bus bandwidth over message size, one row of panels per operation."""
    figure, axes = panels(len(results), 2, 10.0, 3.2 * len(results))
    for row, result in zip(axes, results, strict=True):
        sizes = [size["bytes"] for size in result["sizes"]]
        for name, color in COLORS.items():
            found = [each for size in result["sizes"] for each in size["implementations"] if each["name"] == name]
            if found:
                style = {"marker": "o", "markersize": 3, "color": color, "label": name}
                row[0].plot(sizes, [each["time_us"]["median"] for each in found], **style)
                row[1].plot(sizes, [each["busbw_gb_per_s"] for each in found], **style)
        for axis, label in zip(row, ("time p50, us", "bus bandwidth, GB/s"), strict=True):
            axis.set_xscale("log", base=4)
            axis.set_yscale("log")
            axis.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45, fontsize=7)
            axis.minorticks_off()
            finish_panel(axis, f"{result['operation']}, {ranks_text(result['world_size'])}", "message size", label)
        # Outside the axes, because the curves reach into every corner.
        row[1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


CASE = BenchCase(
    name="collective",
    title="single collectives by message size (no model: torch's gloo, MPICH and ours)",
    models=(),
    unit="us",
    options={
        "op": Option(("all_reduce",), several(one_of(BUS_FACTORS)), f"Some of {', '.join(BUS_FACTORS)}."),
        "sizes": Option(SIZES_BYTES, several(whole_number(1, 2**32)), "Bytes.", quick=SIZES_BYTES[2:10:3]),
    },
    measure=measure,
    run=run,
    table=collective_table,
    draw=draw,
    note=(
        "collective: fp32. Rows take turns, each on its own kind of memory, on inputs that ranks have just written. "
        "Times are rank 0's; slow: the slowest rank of each round; bus: as in nccl-tests. Ratios are taken per round."
    ),
)
