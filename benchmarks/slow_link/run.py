"""Runs the benchmark: builds the network, launches the ranks on it and builds the document."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from benchmarks.slow_link.job import SlowLinkJob
from benchmarks.slow_link.report import render
from benchmarks.slow_link.results import race_result
from benchmarks.training.methods import METHODS
from benchmarks.two_hosts.launch import launch_on_hosts
from benchmarks.two_hosts.network import two_hosts
from torchddp.harness.command import Display, progress_bar
from torchddp.harness.launch import STALL_TIMEOUT_S
from torchddp.harness.machine import new_document

# The timeouts suit links of at least this many bits per second; on slower links they are scaled up.
FULL_SPEED = 100_000_000


def run(job: SlowLinkJob, rate: int, command: str, console: Console) -> dict[str, Any]:
    """Train, print the report, return the document."""
    patience = max(1.0, FULL_SPEED / rate)
    job = replace(job, collective_timeout_s=job.collective_timeout_s * patience)
    document = new_document(command, {**asdict(job), "rate": rate})
    with two_hosts(rate) as hosts, progress_bar(console) as progress:
        display = Display(progress)
        display.start(job.case)
        raw = launch_on_hosts(
            job,
            hosts,
            display.update,
            STALL_TIMEOUT_S * patience,
            worker="benchmarks.slow_link.worker",
            ranks_per_host=job.ranks_per_host,
        )
    result = race_result(raw, {name: METHODS[name].what for name in job.methods})
    shape = {key: getattr(job, key) for key in ("world_size", "ranks_per_host", "slice_steps")}
    document["results"] = [{**result, **shape, "sync_every": job.outer.sync_every, "rate": rate}]
    console.print(render(document))
    return document
