"""Runs the launches in turn; keeps and shows each result as soon as it is available."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.gpu.cases import (
    HOST_CASE,
    MEMORY_CASE,
    MODELS_CASE,
    OPTIONS_CASE,
    PACK_CASE,
    SCALE_CASE,
    USUAL,
    WAYS,
    GpuJob,
)
from benchmarks.gpu.leave import time_leaving
from benchmarks.gpu.report import render_end, render_result
from benchmarks.gpu.results import duel_result, leave_result, memory_result, model_result
from benchmarks.gpu.variants import field_of, make_field, torch_lacks
from benchmarks.gpu.worker import measure
from torchddp.harness.command import Display, progress_bar
from torchddp.harness.launch import LaunchError, launch
from torchddp.harness.machine import new_document
from torchddp.harness.variants import TORCHDDP, ArgumentError, load_class

MODELS_PART = "models"
ROW_PARTS = ("pack", "scale", "host", "options", "memory", "leave")
# Share of a launch spent on timing, a fifth of it warm-up; starting, building, checking and counting take the rest.
TIMED_SHARE = 0.5
QUICK_SEQUENCE = 64
# The model for the memory part, and the one whose cost is largest relative to its computation.
LARGE_MODEL, SMALL_MODEL = "gpt2", "small"

Document = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The validated command-line options."""

    parts: tuple[str, ...]
    models: tuple[str, ...]
    seconds: float
    world_size: int
    backend: str
    device: str
    caps_mb: tuple[float, ...]
    sequence: int
    quick: bool
    seed: int


@dataclass(frozen=True)
class Stage:
    """A unit that succeeds or fails as a whole: one or more launches, and the conversion of their results."""

    name: str
    # Takes its seconds and the progress display; returns raw results.
    measure: Callable[[float, Display], list[dict[str, Any]]]
    results: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def check_device(device: str, backend: str) -> None:
    """Raises `ArgumentError` for settings that the ranks would fail with."""
    if device == "cpu":
        if backend == "nccl":
            raise ArgumentError("NCCL does not support CPU tensors: use --backend gloo with --device cpu.")
        return
    import torch

    if not torch.cuda.is_available():
        build = "has no GPU here" if torch.version.cuda else "is a CPU build"
        raise ArgumentError(f"torch {torch.__version__} {build}; --device cpu runs the program without one.")


def make_job(settings: Settings, case: str, models: Sequence[str] = (), **about: Any) -> GpuJob:
    """The job description for the ranks. The launch sets the time."""
    return GpuJob(
        case=case,
        models=tuple(models),
        **{"variants": (), **about},
        world_size=settings.world_size,
        seconds=0.0,
        seed=settings.seed,
        collective_timeout_s=60.0 + 2 * settings.seconds,
        backend=settings.backend,
        device=settings.device,
        quick=settings.quick,
        sequence=QUICK_SEQUENCE if settings.quick else settings.sequence,
    )


def _launch_each(jobs: Sequence[GpuJob], seconds: float, display: Display) -> list[dict[str, Any]]:
    raws: list[dict[str, Any]] = []
    for job in jobs:
        display.start(job.case)
        raws += launch(replace(job, seconds=TIMED_SHARE * seconds / len(jobs)), measure, display.update)
    return raws


def _model_stage(job: GpuJob) -> Stage:
    def results(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lacking = torch_lacks()
        return [model_result(job.case, job.variants, raw, job.world_size, lacking) for raw in raws]

    (model,) = job.models
    return Stage(f"{model} {job.way.name}".rstrip(), partial(_launch_each, [job]), results)


def _leave_stage(settings: Settings) -> Stage:
    def leaving(seconds: float, display: Display) -> list[dict[str, Any]]:
        display.start("gpu_leave")
        update = partial(display.update, "programs that end")
        return [time_leaving(settings.device, settings.backend, seconds, update)]

    return Stage("leave", leaving, lambda raws: [leave_result(raw) for raw in raws])


def stages(settings: Settings) -> Iterable[Stage]:
    """The stages, most valuable first; each in its own processes, so that a failure loses no other result."""
    for part in settings.parts:
        match part:
            case "models":
                field = make_field(TORCHDDP, settings.caps_mb)
                for model in settings.models:
                    yield _model_stage(make_job(settings, MODELS_CASE.name, [model], variants=field))
            case "pack" | "scale" | "host":
                case = {"pack": PACK_CASE, "scale": SCALE_CASE, "host": HOST_CASE}[part]
                launches = partial(_launch_each, [make_job(settings, case)])
                yield Stage(part, launches, lambda raws: [duel_result(raw) for raw in raws])
            case "options":
                for way in WAYS:
                    about = {"variants": field_of(way), "way": way}
                    yield _model_stage(make_job(settings, OPTIONS_CASE, [SMALL_MODEL], **about))
            case "memory":
                # Each variant alone, so that leftovers of one do not count for the next.
                by_variant = [
                    make_job(settings, MEMORY_CASE, [LARGE_MODEL], variants=(variant,)) for variant in field_of(USUAL)
                ]
                yield Stage(part, partial(_launch_each, by_variant), lambda raws: [memory_result(raws)])
            case "leave":
                yield _leave_stage(settings)


def run(settings: Settings, command: str, console: Console, keep: Callable[[Document], None]) -> Document:
    """Run the stages, print their tables and return the document, which `keep` receives after each stage.

    A failed stage is recorded in the document, and the next ones still run.
    """
    check_device(settings.device, settings.backend)
    load_class(TORCHDDP)
    document = {**new_document(command, asdict(settings)), "failures": []}
    planned = list(stages(settings))
    end_s = time.monotonic() + settings.seconds
    for index, stage in enumerate(planned):
        seconds = max(0.0, end_s - time.monotonic()) / (len(planned) - index)
        try:
            with progress_bar(console) as progress:
                raws = stage.measure(seconds, Display(progress))
        except LaunchError as error:
            document["failures"].append({"stage": stage.name, "error": str(error)})
            console.print(f"{stage.name} failed: {error}", style="red", markup=False, highlight=False)
        else:
            for raw in raws:
                if raw["kind"] == "gpu":
                    document["machine"]["gpu"] = raw["gpu"]
            found = stage.results([raw for raw in raws if raw["kind"] != "gpu"])
            document["results"] += found
            for result in found:
                console.print(render_result(result), "")
        keep(document)
    console.print(render_end(document))
    return document
