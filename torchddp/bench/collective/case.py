"""The case `collective`: single collectives over message sizes; gloo beside ours, on request other packages too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchddp.bench.cases import BenchCase, Settings
from torchddp.bench.collective.measure import time_operation
from torchddp.bench.collective.operations import QUICK_SIZES_BYTES, SIZES_BYTES
from torchddp.bench.collective.peers import deepspeed_shm
from torchddp.bench.collective.results import collective_result
from torchddp.bench.collective.show import collective_table, draw_curves
from torchddp.harness.command import Display


def _course(case: BenchCase, settings: Settings, display: Display) -> list[dict[str, Any]]:
    sizes = QUICK_SIZES_BYTES if settings.quick else SIZES_BYTES
    job = replace(
        settings.job_of(case),
        variants=(),
        operations=settings.operations,
        sizes_bytes=sizes,
        with_peers=settings.collective_peers,
    )
    display.start(case.name)
    if job.with_peers:
        deepspeed_shm.compile_once(lambda: display.update("compiling DeepSpeed's operator, once", 0, 1))
    return [collective_result(raw, job.world_size) for raw in case.launch(job, display)]


CASE = BenchCase(
    name="collective",
    title="single collectives over message sizes (no model: torch's gloo, ours, and other packages with --peers)",
    models=(),
    quick_models=(),
    unit="us",
    measure=time_operation,
    course=_course,
    table=collective_table,
    draw=draw_curves,
    note=(
        "collective: fp32, each implementation in turn on memory of its own kind, on an input that every rank wrote "
        "just before; times of rank 0, slow: of the slowest rank of each round. With few rounds p99 is the "
        "slowest. GB/s from p50; bus as nccl-tests counts it; vs gloo and vs best peer per round. x roof: p50 over the "
        "time in which the same ranks, each copying within its own memory, move the bytes that an all-reduce in "
        "shared memory must."
    ),
)
