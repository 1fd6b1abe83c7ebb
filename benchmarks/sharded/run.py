"""Runs the benchmark: launches it and builds the document behind tables, JSON and plots."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

import torchddp
from benchmarks.sharded import measure, memory
from benchmarks.sharded.field import PACKAGES, choose_variants
from benchmarks.sharded.report import render
from benchmarks.sharded.results import MEMORY_CASE, SPEED_CASE, memory_result, speed_result
from torchddp.bench.cases import Job
from torchddp.bench.memory import ALLOCATOR_ENVIRONMENT
from torchddp.harness.command import Display, progress_bar
from torchddp.harness.launch import ThisHost, launch
from torchddp.harness.machine import new_document
from torchddp.harness.variants import Variant


@dataclass(frozen=True)
class Settings:
    """The validated command-line options."""

    models: tuple[str, ...]
    # All if empty.
    variants: tuple[str, ...]
    world_sizes: tuple[int, ...]
    seconds: float
    memory: bool
    seed: int


def package_version(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _speed(settings: Settings, variants: tuple[Variant, ...], world_size: int, display: Display) -> list[Any]:
    """Times all variants in turn, with all models in one launch."""
    display.start(SPEED_CASE)
    job = Job(SPEED_CASE, settings.models, variants, world_size, settings.seconds, settings.seed)
    raws = launch(job, measure.measure, display.update)
    return [speed_result(variants, raw, world_size) for raw in raws]


def _memory(settings: Settings, variants: tuple[Variant, ...], world_size: int, display: Display) -> list[Any]:
    """Measures each variant in its own processes, so that leftovers of one do not count for the next."""
    results = []
    for model in settings.models:
        raws = []
        for index, variant in enumerate(variants):
            display.start(MEMORY_CASE)
            display.update(f"{model}, {variant.name}, {world_size} ranks", index, len(variants))
            job = Job(MEMORY_CASE, (model,), (variant,), world_size, settings.seconds, settings.seed)
            raws.append(launch(job, memory.measure, display.update, ThisHost(ALLOCATOR_ENVIRONMENT)))
        results.append(memory_result(variants, raws, world_size))
    return results


def run(settings: Settings, command: str, console: Console) -> dict[str, Any]:
    """Measure, print the report, return the document."""
    document = new_document(command, asdict(settings))
    # The peers' environment has only a path to the checkout, so its metadata does not list torchddp.
    document["machine"]["torchddp"] = document["machine"]["torchddp"] or torchddp.__version__
    document["peers"] = {name: package_version(name) for name in PACKAGES}
    variants = choose_variants(settings.variants)
    with progress_bar(console) as progress:
        display = Display(progress)
        for world_size in settings.world_sizes:
            measure_all = _memory if settings.memory else _speed
            document["results"] += measure_all(settings, variants, world_size, display)
    console.print(render(document))
    return document
