"""The course of each case: which launches it takes, and what becomes of what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchddp.bench.cases import ALLOCATOR_ENVIRONMENT, Case, Job
from torchddp.bench.collective.operations import QUICK_SIZES_BYTES, SIZES_BYTES
from torchddp.bench.collective.results import collective_result
from torchddp.bench.overlap.results import overlap_result
from torchddp.bench.results import memory_result, timed_result
from torchddp.bench.scaling.results import scaling_result
from torchddp.bench.settings import Settings
from torchddp.bench.startup.results import startup_result
from torchddp.bench.step_time.results import step_time_result
from torchddp.harness.launch import launch
from torchddp.harness.machine import available_cores
from torchddp.harness.progress import Display
from torchddp.harness.variants import Variant

Results = list[dict[str, Any]]
# Case, settings, display -> the results of all models or collectives of the case.
Course = Callable[[Case, Settings, Display], Results]
# Variants, what the ranks measured, world size -> the result of one model.
MakeResult = Callable[[Sequence[Variant], dict[str, Any], int], dict[str, Any]]


def _one_launch(make_result: MakeResult) -> Course:
    """All models in one launch, all variants side by side."""

    def course(case: Case, settings: Settings, display: Display) -> Results:
        variants, world_size = settings.variants_of(case), settings.world_size_of(case)
        models, seconds = settings.models_of(case), settings.seconds_of(case)
        display.start(case.name)
        raws = launch(Job(case.name, models, variants, world_size, seconds, settings.seed), display.update)
        return [make_result(variants, raw, world_size) for raw in raws]

    return course


def _timed(case: Case, settings: Settings, display: Display) -> Results:
    def make_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
        return timed_result(case, variants, raw, world_size)

    return _one_launch(make_result)(case, settings, display)


def _memory(case: Case, settings: Settings, display: Display) -> Results:
    """Each variant in processes of its own: what one leaves behind must not count for the next."""
    variants, world_size = settings.variants_of(case), settings.world_size_of(case)
    models, seconds = settings.models_of(case), settings.seconds_of(case)
    raws: dict[str, Results] = {model: [] for model in models}
    launches = [(model, variant) for model in models for variant in variants]
    for index, (model, variant) in enumerate(launches):
        display.start(case.name)
        display.update(f"{model}, {variant.name}", index, len(launches))
        job = Job(case.name, (model,), (variant,), world_size, seconds, settings.seed)
        raws[model] += launch(job, display.update, ALLOCATOR_ENVIRONMENT)
    return [memory_result(variants, raws[model], world_size) for model in models]


def _collective(case: Case, settings: Settings, display: Display) -> Results:
    job = Job(
        case=case.name,
        models=(),
        variants=(),
        world_size=settings.world_size_of(case),
        seconds=settings.seconds_of(case),
        seed=settings.seed,
        operations=settings.operations,
        sizes_bytes=QUICK_SIZES_BYTES if settings.quick else SIZES_BYTES,
    )
    display.start(case.name)
    return [collective_result(raw, job.world_size) for raw in launch(job, display.update)]


def _scaling(case: Case, settings: Settings, display: Display) -> Results:
    """A launch for each world size, which share the time of a model."""
    variants, models, world_sizes = settings.variants_of(case), settings.models_of(case), settings.scaling_world_sizes()
    seconds = settings.seconds_of(case) / len(world_sizes)
    raws: dict[str, dict[int, dict[str, Any]]] = {model: {} for model in models}
    for world_size in world_sizes:
        display.start(f"{case.name}, world size {world_size}")
        for raw in launch(Job(case.name, models, variants, world_size, seconds, settings.seed), display.update):
            raws[raw["model"]][world_size] = raw
    return [scaling_result(variants, raws[model], available_cores()) for model in models]


COURSES: dict[str, Course] = {
    "step_time": _one_launch(step_time_result),
    "overlap": _one_launch(overlap_result),
    "collective": _collective,
    "startup": _one_launch(startup_result),
    "memory": _memory,
    "scaling": _scaling,
    "per_param": _timed,
    "exposed": _timed,
}
