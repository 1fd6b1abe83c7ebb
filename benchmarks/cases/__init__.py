"""Developers' cases of `python -m benchmarks`. `torchddp.bench.cases` says how to write one."""

from __future__ import annotations

from benchmarks.cases import chaos, checks, collective, gpu, gpu_rows, links, recovery, sharded, torchft, training
from torchddp.bench.cases import BenchCase

CASES: tuple[BenchCase, ...] = (
    chaos.CASE,
    checks.CASE,
    collective.CASE,
    links.CASE,
    recovery.CASE,
    *sharded.CASES,
    torchft.CASE,
    training.CASE,
    gpu.CASE,
    gpu_rows.PACK,
    gpu_rows.SCALE,
    gpu_rows.HOST,
    gpu.MEMORY,
)
