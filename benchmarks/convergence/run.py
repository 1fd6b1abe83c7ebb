"""Runs the benchmark: launches it and builds the document behind tables, JSON and plots."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from benchmarks.convergence.job import ConvergenceJob
from benchmarks.convergence.report import render
from benchmarks.convergence.results import task_result
from benchmarks.convergence.worker import measure
from benchmarks.training.methods import METHODS
from torchddp.harness.command import Display, progress_bar
from torchddp.harness.launch import launch
from torchddp.harness.machine import new_document


def run(job: ConvergenceJob, command: str, console: Console) -> dict[str, Any]:
    """Train, print the report, return the document."""
    document = new_document(command, asdict(job))
    with progress_bar(console) as progress:
        display = Display(progress)
        display.start(job.case)
        raws = launch(job, measure, display.update)
    whats = {name: METHODS[name].what for name in job.methods}
    document["results"] = [{**task_result(raw, whats), "world_size": job.world_size} for raw in raws]
    console.print(render(document))
    return document
