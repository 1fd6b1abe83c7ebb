"""Benchmark cases, the job that one launch of a case runs, and the checked command-line settings.

Imports neither torch nor numpy, so that `torchddp` starts even where one of them fails to load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from rich.table import Table

from torchddp.harness.command import Display
from torchddp.harness.launch import Report, Reporter, launch
from torchddp.harness.variants import DEFAULT_CAPS_MB, Variant, make_variants

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# About two minutes.
DEFAULT_CASES = ("step_time", "overlap", "memory")
# A round is one step of every variant. A median of fewer rounds means little.
MIN_ROUNDS = 7
MAX_ROUNDS = 5000
# torch's default bucket size, for cases that do not compare sizes.
ONE_CAP_MB = (25.0,)
DEFAULT_WORLD_SIZES = (1, 2, 4)
QUICK_WORLD_SIZES = (1, 2)
QUICK_SECONDS = 2.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What to measure, and the defaults. `models` is empty if the case measures no DDP class."""

    name: str
    title: str
    # Used without --model, which accepts any model.
    models: tuple[str, ...]
    quick_models: tuple[str, ...]
    default_world_size: int = 2
    unit: str = "ms"
    # The target for our ratio to torch's best; None if the case has no target.
    goal_ratio: float | None = None
    # Time for each model's timed rounds, without --seconds.
    seconds: float = 45.0
    # Bucket sizes of the tuned rows, without --caps.
    caps_mb: tuple[float, ...] = DEFAULT_CAPS_MB
    # Whether --caps changes them.
    takes_caps: bool = True
    # With fewer ranks there is nothing to measure.
    min_world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class BenchCase(Case):
    """A case of `torchddp bench`: how to measure it and how to show its results."""

    # Measures one model, or one collective. Runs on every rank.
    measure: Callable[[Job, str, Report], dict[str, Any]]
    # Makes all launches of the case; returns the results of all models or collectives.
    run: Callable[[BenchCase, Settings, Display], list[Result]]
    # Table and plot depend on the results only, so that a saved JSON reproduces them.
    table: Callable[[Result], Table]
    draw: Callable[[Sequence[Result]], Figure]
    # Printed with the results: how to read them.
    note: str

    def launch(self, job: Job, display: Display, environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Measure each model, or collective, of the job on newly started ranks."""
        raws: list[dict[str, Any]] = launch(job, partial(_measure_each, self.measure), display.update, environment)
        return raws


@dataclass(frozen=True)
class Job:
    """Everything one launch of worker processes needs to know. Picklable."""

    case: str
    models: tuple[str, ...]
    variants: tuple[Variant, ...]
    world_size: int
    seconds: float
    seed: int = 0
    # A rank that waits longer than this for another rank raises an error.
    collective_timeout_s: float = 60.0
    backend: str = "gloo"
    # For the case `collective`, instead of models and variants.
    operations: tuple[str, ...] = ()
    sizes_bytes: tuple[int, ...] = ()
    # Whether to time other packages' collectives too.
    with_peers: bool = False
    find_unused_parameters: bool = False

    @property
    def control_device(self) -> str:
        """The device of the tensors that ranks exchange outside the timed work."""
        return "cuda" if self.backend == "nccl" else "cpu"


@dataclass(frozen=True)
class Settings:
    """The checked command-line options. None and () mean the case's default."""

    cases: tuple[str, ...]
    models: tuple[str, ...]
    operations: tuple[str, ...]
    seconds: float | None
    world_size: int | None
    world_sizes: tuple[int, ...]
    caps_mb: tuple[float, ...] | None
    ours: str
    peers: tuple[str, ...]
    ours_tuned: bool
    quick: bool
    seed: int
    # For the case `collective`: whether to time other packages' collectives too.
    collective_peers: bool = False
    find_unused_parameters: bool = False

    def models_of(self, case: Case) -> tuple[str, ...]:
        return self.models or (case.quick_models if self.quick else case.models)

    def seconds_of(self, case: Case) -> float:
        if self.seconds is not None:
            return self.seconds
        return QUICK_SECONDS if self.quick else case.seconds

    def scaling_world_sizes(self) -> tuple[int, ...]:
        return self.world_sizes or (QUICK_WORLD_SIZES if self.quick else DEFAULT_WORLD_SIZES)

    def variants_of(self, case: Case) -> tuple[Variant, ...]:
        if self.caps_mb is not None and case.takes_caps:
            caps_mb = self.caps_mb
        else:
            # --quick keeps every second size: by default the smallest and torch's own.
            caps_mb = case.caps_mb[::2] if self.quick else case.caps_mb
        extra = {"find_unused_parameters": True} if self.find_unused_parameters else {}
        return make_variants(self.ours, self.peers, caps_mb, ours_tuned=self.ours_tuned, extra=extra)

    def job_of(self, case: Case) -> Job:
        """The job of one launch with all models and variants of a case."""
        return Job(
            case=case.name,
            models=self.models_of(case),
            variants=self.variants_of(case),
            world_size=self.world_size or case.default_world_size,
            seconds=self.seconds_of(case),
            seed=self.seed,
            find_unused_parameters=self.find_unused_parameters,
        )


def one_launch(
    make_result: Callable[[Sequence[Variant], dict[str, Any], int], Result],
    case: BenchCase,
    settings: Settings,
    display: Display,
) -> list[Result]:
    """Run a case that takes one launch. `make_result(variants, measurements, world_size)` returns a model's result."""
    job = settings.job_of(case)
    display.start(case.name)
    return [make_result(job.variants, raw, job.world_size) for raw in case.launch(job, display)]


def _measure_each(
    measure: Callable[[Job, str, Report], dict[str, Any]], job: Job, rank: int, channel: Connection
) -> list[dict[str, Any]]:
    from torchddp.harness.models import prove

    # Report problems with a user's model before timing anything.
    for name in job.models:
        if ":" in name:
            prove(name, job.seed, find_unused_parameters=job.find_unused_parameters)
    return [measure(job, name, Reporter(channel, name, enabled=rank == 0)) for name in job.operations or job.models]
