"""Runs the benchmark: builds the network, launches the ranks on it and builds the document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from benchmarks.two_hosts.launch import launch_on_hosts
from benchmarks.two_hosts.network import two_hosts
from benchmarks.two_hosts.report import render
from benchmarks.two_hosts.results import CASE, two_hosts_result, with_transport
from torchddp.bench.cases import Job
from torchddp.harness.command import Display, progress_bar
from torchddp.harness.launch import STALL_TIMEOUT_S
from torchddp.harness.machine import new_document
from torchddp.harness.variants import load_class, make_variants

# The timeouts suit links of at least this many bits per second; on slower links they are scaled up.
FULL_SPEED = 1_000_000_000


@dataclass(frozen=True)
class Settings:
    """The validated command-line options."""

    models: tuple[str, ...]
    seconds: float
    rate: int
    transport: str
    caps_mb: tuple[float, ...]
    ours: str
    seed: int


def patience(rate: int) -> float:
    """How many times longer than usual to wait before giving up."""
    return max(1.0, FULL_SPEED / rate)


def run(settings: Settings, command: str, console: Console) -> dict[str, Any]:
    """Time the models, print the report, return the document."""
    load_class(settings.ours)
    variants = with_transport(make_variants(settings.ours, (), settings.caps_mb), settings.transport)
    job = Job(
        case=CASE.name,
        models=settings.models,
        variants=variants,
        world_size=CASE.default_world_size,
        seconds=settings.seconds,
        seed=settings.seed,
        collective_timeout_s=Job.collective_timeout_s * patience(settings.rate),
    )
    document = new_document(command, asdict(settings))
    with two_hosts(settings.rate) as hosts, progress_bar(console) as progress:
        display = Display(progress)
        display.start(CASE.name)
        raws = launch_on_hosts(job, hosts, display.update, STALL_TIMEOUT_S * patience(settings.rate))
    document["results"] = [two_hosts_result(variants, raw) for raw in raws]
    console.print(render(document))
    return document
