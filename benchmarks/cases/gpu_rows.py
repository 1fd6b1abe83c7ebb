"""The cases `gpu_pack`, `gpu_scale` and `gpu_host`: single operations of a step on a GPU, and other ways to do them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from benchmarks.cases.gpu import OPTIONS, Clock, describe_gpu, gpu_job, gpu_text, pick_device
from benchmarks.trace import DeviceEvent, is_collective, record
from torchddp import DistributedDataParallel
from torchddp.bench.cases import BenchCase, Job, Result, Settings
from torchddp.bench.timing import enough, no_collections
from torchddp.harness.command import Display
from torchddp.harness.launch import Report
from torchddp.harness.plots import finish_panel, panels
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.tables import number, plain_table, ratio_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIB, MIB = 1024, 1024 * 1024
# Calls per profiler session, and per measurement of the host's time.
TRACED_CALLS, HOST_CALLS = 10, 50
Work = Callable[[], object]

# --- rows of times ---------------------------------------------------------------------------------------------------


def device_us(work: Work, device: torch.device, counts: Callable[[DeviceEvent], bool]) -> np.ndarray:
    """Device time per call spent on the events that `counts` selects. On a CPU, the time of each whole call."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        clock = Clock(device)
        return np.array([clock.time(work)[0] * 1000 for _ in range(TRACED_CALLS)])
    events = [event for event in record(lambda: [work() for _ in range(TRACED_CALLS)]) if counts(event)]
    return split_by_call([event.end_us - event.start_us for event in events], TRACED_CALLS)


def split_by_call(durations_us: Sequence[float], calls: int) -> np.ndarray:
    """The sum of durations per call. RuntimeError unless each call can have made equally many events."""
    if not durations_us or len(durations_us) % calls:
        raise RuntimeError(f"the profiler saw {len(durations_us)} matching events in {calls} equal calls")
    sums: np.ndarray = np.reshape(durations_us, (calls, -1)).sum(axis=1)
    return sums


def host_us(works: Sequence[Work], device: torch.device, seconds: float, seed: int) -> np.ndarray:
    """Host time per call, [work, round]: the mean of several in a row, from an idle device."""
    clock, shuffler, order = Clock(device), random.Random(seed), list(range(len(works)))
    rounds: list[list[float]] = []
    with no_collections():
        start_s = time.monotonic()
        while not enough(len(rounds), time.monotonic() - start_s, seconds):
            shuffler.shuffle(order)
            times_us = [0.0] * len(works)
            for index in order:
                _, host_ms = clock.time(lambda work=works[index]: [work() for _ in range(HOST_CALLS)])  # type: ignore[misc]
                times_us[index] = host_ms * 1000 / HOST_CALLS
            rounds.append(times_us)
    return np.array(rounds[1:]).T  # the first warms up


def rows_of(title: str, times_us: Mapping[str, np.ndarray], nbytes: int = 0) -> dict[str, Any]:
    """A table: each way's time, its speed relative to the first way's, and GB/s if it moves `nbytes` bytes."""
    first, *_ = times_us.values()
    rows = [
        {
            "name": name,
            "us": summarize(each),
            "gb_per_s": summarize(nbytes / each / 1e3) if nbytes else None,
            "speed": None if each is first else paired_ratio(first, each).to_dict(),
        }
        for name, each in times_us.items()
    ]
    return {"title": title, "rows": rows}


# --- a step that only packs and reduces ------------------------------------------------------------------------------


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        # No other reference to it exists, so autograd keeps it as .grad without a copy.
        return ctx.gradient.clone(), None


class Given(nn.Module):
    """A model with one parameter per given gradient."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros_like(gradient) for gradient in gradients)
        self.gradients = list(gradients)

    def forward(self) -> Tensor:
        pairs = zip(self.weights, self.gradients, strict=True)
        given = [_Give.apply(weight, grad) for weight, grad in pairs]  # type: ignore[no-untyped-call]
        return torch.stack(given).sum()


def given_step(gradients: Sequence[Tensor], divisor: int, *, in_place: bool = False, **options: Any) -> Work:
    """A step of such a model in one bucket; averages are the sums over the divisor.

    RuntimeError if they are not, or with `in_place`, if gradients are packed.
    """
    model = DistributedDataParallel(Given(gradients), bucket_cap_mb_list=[4096], **options)
    model.reducer.set_divisor(lambda: divisor)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model().backward()

    step()
    for index, (weight, given) in enumerate(zip(model.module.weights, gradients, strict=True)):
        if not torch.equal(weight.grad, given * (dist.get_world_size() / divisor)):
            raise RuntimeError(f"gradient {index} of {len(gradients)} is not what was reduced")
    if in_place and model.reducer.bucket_memory_bytes >= min(gradient.nbytes for gradient in gradients):
        raise RuntimeError("gradients are packed into the bucket, not reduced in place")
    return step


def random_gradients(numels: Sequence[int], device: torch.device, seed: int) -> list[Tensor]:
    """Random values: equal ones would hide a write to the wrong place."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(numel, generator=generator, device=device) for numel in numels]


# --- the cases -------------------------------------------------------------------------------------------------------

# Typical gradient sizes: a few large, many small, each a multiple of 128 bytes.
NUMELS = (768, 768, 147456, 384, 64, 36864, 192, 32, 589824)
# More than the last-level cache of a Hopper chip, so that memory bandwidth is measured.
PACK_BYTES, QUICK_PACK_BYTES = (64 * MIB, 256 * MIB), (1 * MIB,)
# From 1 MiB, gradients are reduced in place.
SCALE_BYTES, QUICK_SCALE_BYTES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB), (1 * MIB,)
HOST_BYTES = 64 * KIB


def numels_of(total: int) -> list[int]:
    """Gradient sizes that add up to `total` elements."""
    sizes: list[int] = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(NUMELS[len(sizes) % len(NUMELS)], left))
    return sizes


def is_pack(event: DeviceEvent) -> bool:
    """Whether this is our packing kernel."""
    return event.kind == "kernel" and "pack_kernel" in event.name


def measure_pack(job: Job, name: str, report: Report) -> dict[str, Any]:
    """Packing a bucket, compared with a plain copy of as many bytes."""
    device = pick_device(job)
    tables: list[dict[str, Any]] = []
    for size in QUICK_PACK_BYTES if job.options["quick"] else PACK_BYTES:
        report(len(tables), len(PACK_BYTES))
        gradients = random_gradients(numels_of(size // 4), device, job.seed)
        source = torch.randn(size // 4, device=device)
        target = torch.empty_like(source)
        times_us = {"copy": device_us(lambda: target.copy_(source), device, lambda event: event.kind != "fill")}  # noqa: B023
        for text, divisor in (("", job.world_size), (", times 1/2", 2 * job.world_size)):
            # Over the process group the bucket is torch's memory, like that of the copy. Views lie in the bucket.
            step = given_step(gradients, divisor, gradient_as_bucket_view=True, transport="c10d")
            times_us[f"torchddp pack{text}"] = device_us(step, device, is_pack)
        tables.append(rows_of(f"{size // MIB} MiB in {len(gradients)} gradients", times_us, 2 * size))
    return {"gpu": describe_gpu(device), "tables": tables}


def measure_scale(job: Job, name: str, report: Report) -> dict[str, Any]:
    """A gradient that NCCL scales (PreMulSum) and reduces in place, compared with one that is packed and scaled."""
    device = pick_device(job)
    tables: list[dict[str, Any]] = []
    divisor = 2 * job.world_size

    def counts(event: DeviceEvent) -> bool:  # not the copy that made the gradient
        return is_pack(event) or is_collective(event)

    for size in QUICK_SCALE_BYTES if job.options["quick"] else SCALE_BYTES:
        report(len(tables), len(SCALE_BYTES))
        (gradient,) = random_gradients([size // 4], device, job.seed)
        packed = given_step([gradient], divisor, gradient_as_bucket_view=True)
        times_us = {"packed with the scale, then reduced": device_us(packed, device, counts)}
        if job.backend == "nccl":  # only NCCL has PreMulSum
            in_place = given_step([gradient], divisor, in_place=True)
            times_us["torchddp, reduced in place"] = device_us(in_place, device, counts)
            operation = dist._make_nccl_premul_sum(1 / divisor)
            # The values soon become 0, which takes just as long.
            by_nccl = lambda: dist.all_reduce(gradient, op=operation)  # noqa: B023, E731
            times_us["PreMulSum, in place"] = device_us(by_nccl, device, counts)
        tables.append(rows_of(f"one gradient of {size / MIB:g} MiB, times 1/{divisor}", times_us))
    return {"gpu": describe_gpu(device), "tables": tables}


def measure_host(job: Job, name: str, report: Report) -> dict[str, Any]:
    """The host's time for an all-reduce, started and awaited on the current stream."""
    device = pick_device(job)
    # The transport that a model on this device gets.
    transport = DistributedDataParallel(nn.Linear(8, 8).to(device)).reducer.transport
    ours = transport.allocate(HOST_BYTES // 4, torch.zeros(1, device=device)).zero_()
    theirs, handle = torch.zeros(HOST_BYTES // 4, device=device), transport.make_work()

    def by_torchddp() -> None:
        transport.all_reduce(ours, handle)
        handle.wait()

    def by_torch() -> None:
        work = dist.all_reduce(theirs, async_op=True)
        assert work is not None
        work.wait()

    works = {"torch.distributed.all_reduce": by_torch, f"torchddp over {transport.name}": by_torchddp}
    times_us = dict(zip(works, host_us([*works.values()], device, job.seconds, job.seed), strict=True))
    tables = [rows_of(f"all-reduce of {HOST_BYTES // KIB} KiB, time of the host", times_us)]
    return {"gpu": describe_gpu(device), "tables": tables}


def run(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    job = replace(gpu_job(case, settings), variants=())
    display.start(case.name)
    (raw,) = case.launch(job, display)
    return [{"case": case.name, "world_size": job.world_size, "gpu": raw["gpu"], **each} for each in raw["tables"]]


def table(result: Result) -> Table:
    rows = result["rows"]
    headings = ["us", *(["GB/s"] if rows[0]["gb_per_s"] else []), "speed / the first's\np50 [95% CI]"]
    found = plain_table(f"{result['case']} · {result['title']}", "way", *headings, notes=[gpu_text(result["gpu"])])
    for row in rows:
        # Without colors: elsewhere a low ratio is good, and here a high one.
        speed = Text(ratio_text(row["speed"], "1 (the first)").plain)
        numbers = [number(row[key]["median"]) for key in ("us", "gb_per_s") if row[key]]
        found.add_row(row["name"], *numbers, speed, style="bold" if row["name"].startswith("torchddp") else "")
    return found


def draw(results: Sequence[Result]) -> Figure:
    figure, axes = panels(len(results), 1, 8.0, 2.0 * len(results))
    for (axis,), result in zip(axes, results, strict=True):
        axis.barh([row["name"] for row in result["rows"]], [row["us"]["median"] for row in result["rows"]])
        axis.invert_yaxis()
        finish_panel(axis, result["title"], "us")
    return figure


PACK = BenchCase(
    name="gpu_pack",
    title="packing a bucket on a GPU, against a copy of as many bytes",
    models=(),
    default_world_size=1,
    unit="us",
    seconds=10.0,
    options={name: OPTIONS[name] for name in ("device", "backend")},
    measure=measure_pack,
    run=run,
    table=table,
    draw=draw,
    note="gpu_pack, gpu_scale: the time of the kernels, by torch's profiler; on a CPU, of the whole step.",
)
SCALE = replace(
    PACK, name="gpu_scale", title="scaling a gradient: in place by NCCL, or when it is packed", measure=measure_scale
)
HOST = replace(
    PACK,
    name="gpu_host",
    title="the host's time for an all-reduce on a GPU, ours and torch's",
    measure=measure_host,
    note="gpu_host: the mean of calls in a row, from an idle device.",
)
