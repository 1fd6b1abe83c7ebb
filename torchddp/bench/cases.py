"""Benchmark cases, the job that one launch of a case runs, and the checked command-line settings.

A case is a `BenchCase` in a file of its own: what it measures, its results, table, plot and note (`step_time.py` is a
short one). Users' cases are in this folder, developers' cases, which only `python -m benchmarks` has, in
`benchmarks/cases`; both are registered in `registry`. A case without models leaves `models` empty:

    def run(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
        job = replace(settings.job_of(case), models=TASKS)       # names for `measure`; without, the case's
        with two_hosts(job.options["rate"]) as place:            # a `harness.launch.Place`; the default is this host
            raws = case.launch(job, display, place)              # `measure(job, name, report)` for each name
        return [{"case": case.name, **raw} for raw in raws]      # JSON; `table` shows one, `summary` all

Imports neither torch nor numpy, so that `torchddp` starts even where one of them fails to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from torchddp.harness.command import Display
from torchddp.harness.launch import THIS_HOST, LaunchError, Place, RankJob, Report, Reporter, launch
from torchddp.harness.variants import DEFAULT_CAPS_MB, Variant, make_variants

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# About two minutes.
DEFAULT_CASES = ("step_time", "exposed", "memory")
# A round is one step of every variant. A median of fewer rounds means little.
MIN_ROUNDS = 7
MAX_ROUNDS = 5000
# torch's default bucket size, for cases that do not compare sizes.
ONE_CAP_MB = (25.0,)
QUICK_SECONDS = 2.0

Result = dict[str, Any]
Measure = Callable[["Job", str, Report], dict[str, Any]]
Parse = Callable[[str], Any]


@dataclass(frozen=True)
class Option:
    """An option of one case. `parse` turns the text into the value and raises `ArgumentError` or `ValueError`."""

    default: Any
    parse: Parse
    help: str
    # The value with --quick; None means the default.
    quick: Any = None

    def value(self, quick: bool) -> Any:
        return self.default if self.quick is None or not quick else self.quick


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    name: str
    title: str
    # Used without --model, which accepts any model. Empty if the case measures no DDP class.
    models: tuple[str, ...]
    quick_models: tuple[str, ...] = ()  # with --quick, if only some of them
    default_world_size: int = 2
    unit: str = "ms"
    # What users compare: the key of the time, or of the bytes, in a variant's row.
    key: str = "step_ms"
    # Time for each model's timed rounds, without --seconds.
    seconds: float = 45.0
    # Bucket sizes of the tuned rows, without --caps.
    caps_mb: tuple[float, ...] = DEFAULT_CAPS_MB
    takes_caps: bool = True
    # Measures one of the job's models, or the case. Runs on every rank. None if `run` starts programs of its own.
    measure: Measure | None = None
    # Makes all launches of the case; returns the results of all of these, or yields each as soon as it has it.
    run: Callable[[BenchCase, Settings, Display], Iterable[Result]]
    # Tables and plot depend on the results only, so that a saved JSON reproduces them.
    table: Callable[[Result], Table]
    draw: Callable[[Sequence[Result]], Figure]
    summary: Callable[[Sequence[Result]], Sequence[Table]] | None = None
    note: str
    options: Mapping[str, Option] = field(default_factory=dict)

    def launch(self, job: Job, display: Display, place: Place = THIS_HOST) -> list[dict[str, Any]]:
        ranks = RankJob(
            job.case, _measure_each, (self.measure, job), job.world_size, job.backend, job.collective_timeout_s
        )
        raws: list[dict[str, Any]] = launch(ranks, display.update, place)
        return raws


@dataclass(frozen=True)
class Job:
    case: str
    models: tuple[str, ...]
    variants: tuple[Variant, ...]
    world_size: int
    seconds: float
    seed: int = 0
    collective_timeout_s: float = 60.0
    backend: str = "gloo"
    find_unused_parameters: bool = False
    # Of the case, with defaults filled in.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def control_device(self) -> str:
        """The device of the tensors that ranks exchange outside the timed work."""
        return "cuda" if self.backend == "nccl" else "cpu"


@dataclass(frozen=True)
class Settings:
    """The checked command-line options. None and () mean the case's default."""

    cases: tuple[str, ...]
    models: tuple[str, ...]
    seconds: float | None
    world_size: int | None
    caps_mb: tuple[float, ...] | None
    ours: str
    peers: tuple[str, ...]
    ours_tuned: bool
    quick: bool
    seed: int
    find_unused_parameters: bool = False
    # By case, the options given with --set.
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def variants_of(self, case: BenchCase) -> tuple[Variant, ...]:
        if self.caps_mb is not None and case.takes_caps:
            caps_mb = self.caps_mb
        else:
            # --quick keeps every second size: by default the smallest and torch's own.
            caps_mb = case.caps_mb[::2] if self.quick else case.caps_mb
        extra = {"find_unused_parameters": True} if self.find_unused_parameters else {}
        return make_variants(self.ours, self.peers, caps_mb, ours_tuned=self.ours_tuned, extra=extra)

    def job_of(self, case: BenchCase) -> Job:
        defaults = {name: option.value(self.quick) for name, option in case.options.items()}
        return Job(
            case=case.name,
            models=self.models or (case.quick_models if self.quick else ()) or case.models,
            variants=self.variants_of(case),
            world_size=self.world_size or case.default_world_size,
            seconds=self.seconds or (QUICK_SECONDS if self.quick else case.seconds),
            seed=self.seed,
            find_unused_parameters=self.find_unused_parameters,
            options=defaults | dict(self.options.get(case.name, {})),
        )


def one_launch(
    make_result: Callable[[BenchCase, Sequence[Variant], dict[str, Any], int], Result],
    case: BenchCase,
    settings: Settings,
    display: Display,
) -> Iterator[Result]:
    """Run a case that takes one launch. If that fails, the results of models that were measured before come first.

    `make_result(case, variants, measurements, world_size)` returns a model's result.
    """
    job = settings.job_of(case)
    display.start(case.name)
    try:
        raws, failure = case.launch(job, display), None
    except LaunchError as error:
        raws, failure = [*error.partial], error
    yield from (make_result(case, job.variants, raw, job.world_size) for raw in raws)
    if failure is not None:
        raise failure


def _measure_each(report: Reporter, measure: Measure, job: Job) -> list[dict[str, Any]]:
    from torchddp.harness.models import prove

    # Report problems with a user's model before timing anything.
    for name in job.models:
        if ":" in name:
            prove(name, job.seed, find_unused_parameters=job.find_unused_parameters)
    measured = []
    for name in job.models or (job.case,):
        measured.append(measure(job, name, report.about(name)))
        report.keep(measured[-1])
    return measured
