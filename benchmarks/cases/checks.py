"""The case `checks`: what checks, hang reports and weights add to a step of our class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp import Checks, DistributedDataParallel, StopTogether
from torchddp.bench.cases import BenchCase, Result, Settings
from torchddp.bench.results import describe_variant, draw_bars, model_result, variants_table
from torchddp.bench.timing import time_model
from torchddp.harness.command import Display
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.tables import number, ratio_text
from torchddp.harness.variants import LOCAL, TORCHDDP, Role, Variant

PLAIN = "plain"


class Weighted(DistributedDataParallel):
    """Calls `weigh()` in every step.

    All ranks use the same weight, so gradients are plain averages. The weight changes every step, so the divisor is
    known only after the ranks have summed their weights.
    """

    _weight = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._weight = self._weight % 1000 + 1
        self.weigh(self._weight)
        return super().forward(*inputs, **kwargs)


class Stoppable(DistributedDataParallel):
    """Asks in every step whether to stop, as a training loop with `StopTogether` does."""

    _stop: StopTogether | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._stop is None:
            self._stop = StopTogether(self, signals=())
        if self._stop:
            raise AssertionError("nobody asked it to stop")
        return super().forward(*inputs, **kwargs)


def ours(name: str, **options: object) -> Variant:
    return Variant(name, Role.OURS, TORCHDDP, options)


VARIANTS = (
    LOCAL,
    ours(PLAIN),
    # The same again: the difference between the two rows is noise.
    ours("plain again"),
    # Checks before every step, so that each round includes a check.
    ours("Checks(parameters_every=1)", checks=Checks(parameters_every=1)),
    ours("Checks(nonfinite=True)", checks=Checks(nonfinite=True)),
    ours('Checks(nonfinite="raise")', checks=Checks(nonfinite="raise")),
    ours("no hang reports", checks=Checks(stall_report=0)),
    Variant("weigh()", Role.OURS, f"{__name__}.{Weighted.__name__}"),
    Variant("StopTogether", Role.OURS, f"{__name__}.{Stoppable.__name__}"),
)


def run(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    job = replace(settings.job_of(case), variants=VARIANTS)
    display.start(case.name)
    return [checks_result(job.variants, raw, job.world_size) for raw in case.launch(job, display)]


def checks_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> Result:
    """The ratio of each of our rows to the plain step of its round."""
    step_ms = raw["step_ms"]
    names = [variant.name for variant in variants]
    plain_ms = step_ms[names.index(PLAIN)]
    rows = [
        {
            **describe_variant(variant),
            "step_ms": summarize(times_ms),
            "to_plain": None if name in (LOCAL.name, PLAIN) else paired_ratio(times_ms, plain_ms).to_dict(),
        }
        for name, variant, times_ms in zip(names, variants, step_ms, strict=True)
    ]
    return model_result("checks", raw, world_size, rows, unit="ms", rounds=int(step_ms.shape[1]))


def table(result: Result) -> Table:
    def cells(row: dict[str, Any]) -> list[str | Text]:
        return [number(row["step_ms"]["median"]), ratio_text(row["to_plain"], without="")]

    return variants_table(result, ("step p50\nms", "step / plain\np50 [95% CI]"), cells)


CASE = BenchCase(
    name="checks",
    title="what checks, hang reports and weights add to a step",
    models=("mlp", "gpt", "small"),
    quick_models=("mlp",),
    seconds=40.0,
    caps_mb=(),
    takes_caps=False,
    measure=time_model,
    run=run,
    table=table,
    draw=partial(draw_bars, key="step_ms", with_local=True),
    note="checks: forward and backward, in ms, of the slowest rank; ratios are to the plain class, per round.",
)
