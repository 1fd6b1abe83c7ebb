"""The course of one run: launch after launch, each result kept and shown as soon as it is there."""

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
# Of a launch's share: starting, building, checking and counting kernels take the rest, warm-up a fifth of this.
TIMED_SHARE = 0.5
QUICK_SEQUENCE = 64
# The model whose memory is looked at, and the one that costs most beside its computation.
LARGE_MODEL, SMALL_MODEL = "gpt2", "small"

Document = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What the command line asked for, checked."""

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
    """What stands and falls together: one or several launches, and what becomes of what they say."""

    name: str
    # With the seconds that it has, and who is told how far it is: raw results.
    measure: Callable[[float, Display], list[dict[str, Any]]]
    results: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def check_device(device: str, backend: str) -> None:
    """Refuse at once what the ranks would fail at."""
    if device == "cpu":
        if backend == "nccl":
            raise ArgumentError("NCCL has no CPU tensors: use --backend gloo with --device cpu.")
        return
    import torch

    if not torch.cuda.is_available():
        build = "has no GPU here" if torch.version.cuda else "is a CPU build"
        raise ArgumentError(f"torch {torch.__version__} {build}; --device cpu runs the program without one.")


def make_job(settings: Settings, case: str, models: Sequence[str] = (), **about: Any) -> GpuJob:
    """What the ranks need to know. The time comes with the launch."""
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
    """In the order of what is worth most; each in processes of its own, so that none loses another's result."""
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
                # Each variant alone: what one leaves in the device's memory must not count for the next.
                by_variant = [
                    make_job(settings, MEMORY_CASE, [LARGE_MODEL], variants=(variant,)) for variant in field_of(USUAL)
                ]
                yield Stage(part, partial(_launch_each, by_variant), lambda raws: [memory_result(raws)])
            case "leave":
                yield _leave_stage(settings)


def run(settings: Settings, command: str, console: Console, keep: Callable[[Document], None]) -> Document:
    """Run the stages and print their tables; the document, which `keep` gets after each of them.

    A stage that fails is a line of the document, and the next ones run all the same.
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
