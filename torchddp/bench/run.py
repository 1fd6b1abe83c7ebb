"""The course of one run: launch each case, gather the document that tables, JSON and plots are made from."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from torchddp.bench.cases import ALLOCATOR_ENVIRONMENT, CASES, Case, Job
from torchddp.bench.collective.operations import QUICK_SIZES_BYTES, SIZES_BYTES
from torchddp.bench.collective.results import collective_result
from torchddp.bench.launch import launch
from torchddp.bench.machine import describe_machine
from torchddp.bench.report import render
from torchddp.bench.results import memory_result, timed_result
from torchddp.bench.variants import Role, Variant, load_class, make_variants

# Bucket size hardly matters for memory: one tuned row, at torch's own default size.
MEMORY_CAP_MB = 25


@dataclass(frozen=True)
class Settings:
    """What the command line asked for, checked."""

    cases: tuple[str, ...]
    models: tuple[str, ...]
    operations: tuple[str, ...]
    seconds: float
    world_size: int | None
    caps_mb: tuple[float, ...]
    ours: str
    peers: tuple[str, ...]
    ours_tuned: bool
    quick: bool
    seed: int

    def models_of(self, case: Case) -> tuple[str, ...]:
        """The models to run for a case."""
        if self.models:
            return tuple(model for model in case.models if model in self.models)
        return case.quick_models if self.quick else case.models


def new_document(command: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What every saved run begins with; its results are still to come."""
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "machine": describe_machine(),
        "settings": settings,
        "results": [],
    }


def progress_bar(console: Console) -> Progress:
    """The bar behind a `Display`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=2)


class Display:
    """The progress bar. Redrawn seldom: the ranks need the cores."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def start(self, case: str) -> None:
        """Begin another launch."""
        self._case = case
        self._progress.reset(self._task, total=None, description=f"{case}: starting ranks")

    def update(self, what: str, done: float, total: float) -> None:
        """How far it is, as rank 0 says."""
        self._progress.update(self._task, description=f"{self._case} · {what}", completed=done, total=total)


def _run_timed(case: Case, settings: Settings, variants: Sequence[Variant], display: Display) -> list[dict[str, Any]]:
    job = Job(
        case=case.name,
        models=settings.models_of(case),
        variants=tuple(variants),
        world_size=settings.world_size or case.default_world_size,
        seconds=settings.seconds,
        seed=settings.seed,
    )
    display.start(case.name)
    raws = launch(job, display.update)
    return [timed_result(case, variants, raw, job.world_size) for raw in raws]


def _run_memory(case: Case, settings: Settings, variants: Sequence[Variant], display: Display) -> list[dict[str, Any]]:
    world_size = settings.world_size or case.default_world_size
    models = settings.models_of(case)
    raws: dict[str, list[dict[str, Any]]] = {model: [] for model in models}
    launches = [(model, variant) for model in models for variant in variants]
    for index, (model, variant) in enumerate(launches):
        display.start(case.name)
        display.update(f"{model}, {variant.name}", index, len(launches))
        job = Job(case.name, (model,), (variant,), world_size, settings.seconds, settings.seed)
        raws[model] += launch(job, display.update, ALLOCATOR_ENVIRONMENT)
    return [memory_result(variants, raws[model], world_size) for model in models]


def _run_collective(case: Case, settings: Settings, display: Display) -> list[dict[str, Any]]:
    job = Job(
        case=case.name,
        models=(),
        variants=(),
        world_size=settings.world_size or case.default_world_size,
        seconds=settings.seconds,
        seed=settings.seed,
        operations=settings.operations,
        sizes_bytes=QUICK_SIZES_BYTES if settings.quick else SIZES_BYTES,
    )
    display.start(case.name)
    return [collective_result(raw, job.world_size) for raw in launch(job, display.update)]


def run(settings: Settings, command: str, console: Console) -> dict[str, Any]:
    """Run the cases, print the report, return the document."""
    variants = make_variants(settings.ours, settings.peers, settings.caps_mb, ours_tuned=settings.ours_tuned)
    memory_variants = make_variants(settings.ours, settings.peers, (MEMORY_CAP_MB,), ours_tuned=settings.ours_tuned)
    compares_classes = any(CASES[name].models for name in settings.cases)
    for variant in variants:
        if compares_classes and variant.role is not Role.LOCAL and variant.class_path is not None:
            load_class(variant.class_path)
    document = new_document(command, asdict(settings))
    with progress_bar(console) as progress:
        display = Display(progress)
        for name in settings.cases:
            case = CASES[name]
            if name == "memory":
                document["results"] += _run_memory(case, settings, memory_variants, display)
            elif name == "collective":
                document["results"] += _run_collective(case, settings, display)
            else:
                document["results"] += _run_timed(case, settings, variants, display)
    console.print(render(document))
    return document
