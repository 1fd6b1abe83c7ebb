"""Runs the benchmark: one launch for all models."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console

from benchmarks.checks.field import make_field
from benchmarks.checks.report import render
from benchmarks.checks.results import model_result
from torchddp.bench.cases import Job
from torchddp.harness.command import Display, progress_bar
from torchddp.harness.launch import Reporter, launch
from torchddp.harness.machine import new_document


@dataclass(frozen=True)
class Settings:
    """The validated command-line options."""

    models: tuple[str, ...]
    every: int  # steps between two checks, for the reported cost
    world_size: int
    seconds: float
    seed: int


def measure(job: Job, rank: int, channel: Connection) -> list[dict[str, Any]]:
    """On each rank: every variant's forward and backward in turn, for each model."""
    from torchddp.bench.timing import time_model

    return [time_model(job, model, Reporter(channel, model, enabled=rank == 0)) for model in job.models]


def run(settings: Settings, command: str, console: Console) -> dict[str, Any]:
    """Measure, print the report, return the document."""
    document = new_document(command, asdict(settings))
    variants = make_field()
    job = Job(
        case="checks",
        models=settings.models,
        variants=variants,
        world_size=settings.world_size,
        seconds=settings.seconds,
        seed=settings.seed,
    )
    with progress_bar(console) as progress:
        display = Display(progress)
        display.start("checks")
        raws = launch(job, measure, display.update)
    document["results"] = [model_result(raw, variants, settings.world_size, settings.every) for raw in raws]
    console.print(render(document))
    return document
