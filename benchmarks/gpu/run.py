"""The course of one run: launch the ranks, gather the document that tables, JSON and plots are made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from benchmarks.gpu.cases import MODELS_CASE, GpuJob
from benchmarks.gpu.report import render
from benchmarks.gpu.results import model_result
from benchmarks.gpu.variants import make_field
from benchmarks.gpu.worker import measure
from torchddp.harness.command import Display, progress_bar
from torchddp.harness.launch import launch
from torchddp.harness.machine import new_document
from torchddp.harness.variants import TORCHDDP, ArgumentError, load_class

# Of the time asked for: warm-up takes a fifth of a model's, building and checking the rest.
TIMED_SHARE = 0.6
QUICK_SEQUENCE = 64


@dataclass(frozen=True)
class Settings:
    """What the command line asked for, checked."""

    models: tuple[str, ...]
    seconds: float
    world_size: int
    backend: str
    device: str
    caps_mb: tuple[float, ...]
    sequence: int
    quick: bool
    seed: int


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


def seconds_each(settings: Settings) -> float:
    """The share of each model in the time for timed rounds."""
    return TIMED_SHARE * settings.seconds / len(settings.models)


def make_job(settings: Settings) -> GpuJob:
    """What the ranks need to know."""
    return GpuJob(
        case=MODELS_CASE.name,
        models=settings.models,
        variants=make_field(TORCHDDP, settings.caps_mb),
        world_size=settings.world_size,
        seconds=seconds_each(settings),
        seed=settings.seed,
        collective_timeout_s=60.0 + 2 * settings.seconds,
        backend=settings.backend,
        device=settings.device,
        quick=settings.quick,
        sequence=QUICK_SEQUENCE if settings.quick else settings.sequence,
    )


def run(settings: Settings, command: str, console: Console) -> dict[str, Any]:
    """Time the models, print the report, return the document."""
    check_device(settings.device, settings.backend)
    load_class(TORCHDDP)
    job = make_job(settings)
    document = new_document(command, asdict(settings))
    with progress_bar(console) as progress:
        display = Display(progress)
        display.start(MODELS_CASE.name)
        raws = launch(job, measure, display.update)
    for raw in raws:
        if raw["kind"] == "gpu":
            document["machine"]["gpu"] = raw["gpu"]
        else:
            document["results"].append(model_result(job.variants, raw, job.world_size))
    console.print(render(document))
    return document
