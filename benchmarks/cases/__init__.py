"""Developers' cases of `python -m benchmarks`. `torchddp.bench.cases` says how to write one."""

from __future__ import annotations

from benchmarks.cases import checks, links, training
from torchddp.bench.cases import BenchCase

CASES: tuple[BenchCase, ...] = (checks.CASE, links.CASE, training.CASE)
