"""Runs the benchmark: measures each place in turn, then predicts steps from the profiles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from benchmarks.links.field import CASE, LOCALHOST, make_field
from benchmarks.links.report import render
from benchmarks.links.results import place_result, predictions
from benchmarks.links.worker import measure
from benchmarks.two_hosts.launch import launch_on_hosts
from benchmarks.two_hosts.network import two_hosts
from benchmarks.two_hosts.report import rate_text
from benchmarks.two_hosts.run import patience
from torchddp.bench.cases import Job
from torchddp.harness.command import Display, progress_bar
from torchddp.harness.launch import STALL_TIMEOUT_S, ThisHost, launch
from torchddp.harness.machine import new_document
from torchddp.plan.plan_cache import CACHE_ENV
from torchddp.plan.step_profile import StepProfile


@dataclass(frozen=True)
class Settings:
    """The validated command-line options."""

    models: tuple[str, ...]
    rates: tuple[int, ...]
    one_host: bool
    caps_mb: tuple[float, ...]
    seconds: float
    seed: int


def _measure_place(
    settings: Settings, rate: int | None, update: Callable[[str, float, float], None]
) -> list[dict[str, Any]]:
    """Measures all models between two hosts at `rate` bit/s, or on one host without a rate."""
    slowness = 1.0 if rate is None else patience(rate)
    job = Job(
        case=CASE.name,
        models=settings.models,
        variants=make_field(settings.caps_mb),
        world_size=2,
        seconds=settings.seconds,
        seed=settings.seed,
        collective_timeout_s=Job.collective_timeout_s * slowness,
    )
    with tempfile.TemporaryDirectory(prefix="torchddp-links-") as folder:
        environment = {CACHE_ENV: folder}  # so that no cached plan is reused
        stall_s = STALL_TIMEOUT_S * slowness
        if rate is None:
            raws: list[dict[str, Any]] = launch(job, measure, update, ThisHost(environment), stall_s)
            return raws
        with two_hosts(rate) as hosts:
            raws = launch_on_hosts(
                job,
                hosts,
                update,
                stall_s,
                worker="benchmarks.links.worker",
                ranks_per_host=1,
                environment=environment,
            )
            return raws


def run(settings: Settings, command: str, console: Console) -> dict[str, Any]:
    """Measure every place, print the report, return the document."""
    document = new_document(command, asdict(settings))
    variants = make_field(settings.caps_mb)
    places: dict[str, int | None] = {rate_text(rate): rate for rate in settings.rates}
    if settings.one_host:
        places = {LOCALHOST: None, **places}
    profiles: dict[tuple[str, str], StepProfile] = {}
    with progress_bar(console) as progress:
        display = Display(progress)
        for place, rate in places.items():
            display.start(place)
            for raw in _measure_place(settings, rate, display.update):
                profiles[place, raw["model"]] = raw["profile"]
                document["results"].append(place_result(place, variants, raw))
    rates = {place: rate for place, rate in places.items() if rate is not None}
    document["predictions"] = predictions(document["results"], profiles, rates)
    console.print(render(document))
    return document
