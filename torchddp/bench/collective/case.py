"""The case `collective`: single collectives by message size, of gloo, of torchddp and, with --peers, of others."""

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


def _run(case: BenchCase, settings: Settings, display: Display) -> list[dict[str, Any]]:
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
        deepspeed_shm.compile_once(lambda: display.update("compiling DeepSpeed's operator (only once)", 0, 1))
    return [collective_result(raw, job.world_size) for raw in case.launch(job, display)]


CASE = BenchCase(
    name="collective",
    title="single collectives by message size (no model: torch's gloo, ours, and other packages with --peers)",
    models=(),
    quick_models=(),
    unit="us",
    measure=time_operation,
    run=_run,
    table=collective_table,
    draw=draw_curves,
    note=(
        "collective: fp32. Implementations take turns, each on its own kind of memory, on inputs that the ranks have "
        "just written. Times are rank 0's; slow is the slowest rank of each round. With few rounds, p99 is the "
        "maximum. GB/s is computed from p50; bus as in nccl-tests; vs gloo and vs best peer are per round. x roof: p50 "
        "divided by the time that the same ranks, each copying within its own memory, need to move the bytes that an "
        "all-reduce in shared memory must move."
    ),
)
