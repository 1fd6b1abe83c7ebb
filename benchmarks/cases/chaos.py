"""The case `chaos`: random faults in small training jobs, and whether the other ranks react as docs/testing.md says."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from benchmarks.chaos import plan
from benchmarks.chaos.judge import COLUMNS, Verdict, expect, judge
from benchmarks.chaos.launch import run_trials
from benchmarks.chaos.outcome import Outcome
from benchmarks.chaos.worker import timeout_of
from benchmarks.options import one_of, several, whole_number
from torchddp.bench.cases import BenchCase, Job, Option, Result, Settings
from torchddp.harness.command import Display
from torchddp.harness.launch import LaunchError
from torchddp.harness.plots import COLORS, finish_panel, panels
from torchddp.harness.tables import plain_table
from torchddp.harness.variants import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVER_HERE = plan.OVER if importlib.util.find_spec("torchft") else (plan.SHM, plan.GLOO)
OPTIONS = {
    "trials": Option(300, whole_number(1, 10**6), "Number of trials. [default: 300]", quick=9),
    "kinds": Option(
        plan.KINDS,
        several(one_of((*plan.KINDS, *plan.MUTANTS))),
        f"Some of {', '.join(plan.KINDS)}, or {' and '.join(plan.MUTANTS)}, whose trials must fail.",
    ),
    "over": Option(OVER_HERE, several(one_of(plan.OVER)), f"Some of {', '.join(plan.OVER)}, if it is installed."),
    "world_sizes": Option(
        plan.WORLD_SIZES, several(whole_number(2, max(plan.WORLD_SIZES))), "Numbers of ranks. [default: 2,3,4]"
    ),
    "only": Option(None, whole_number(0, 10**6), "Run only the trial with this number."),
}


def planned(job: Job) -> list[plan.Trial]:
    """The trials of these options. `ArgumentError` if they can't run here, or no fault works over these transports."""
    options = dict(job.options)
    only = options.pop("only")
    if not set(options["over"]) <= set(OVER_HERE):
        raise ArgumentError(f"--set over={plan.TORCHFT} needs torchft, which is not installed here.")
    if not plan.cells(options["kinds"], options["over"]):
        raise ArgumentError(f"No fault of kind {', '.join(options['kinds'])} works over {', '.join(options['over'])}.")
    if only is not None:
        options["trials"] = only + 1
    return plan.make_plan(seed=job.seed, **options)[only or 0 :]


def repeat_command(job: Job) -> str:
    """The command that runs the same plan."""
    lists = ((name, ",".join(map(str, job.options[name]))) for name in ("kinds", "over", "world_sizes"))
    chosen = " ".join(f"--set {name}={value}" for name, value in lists)
    return f"python -m benchmarks --case chaos --seed {job.seed} {chosen}"


def describe(outcome: Outcome, verdict: Verdict) -> dict[str, Any]:
    """A trial's entry in the result."""
    ranks = [
        {
            "rank": rank.rank,
            "exit_code": rank.exit_code,
            "hung": rank.hung,
            "steps": len(rank.report.steps) if rank.report else None,
            "error": rank.report.error if rank.report else None,
            "stderr": rank.stderr if verdict.problems else "",
        }
        for rank in outcome.ranks
    ]
    trial = outcome.trial
    return {
        **asdict(trial),
        "what": str(trial),
        "passed": verdict.ok,
        "problems": verdict.problems,
        "nameable": expect(trial, timeout_of(trial)).is_named,
        "hang_reports": [report.headline for report in outcome.hang_reports],
        "detection_s": verdict.detection_s,
        "took_s": outcome.took_s,
        "ranks": ranks,
    }


def failure_text(row: dict[str, Any], repeat: str) -> Text:
    """One failed trial: what was wrong, and the command that repeats it."""
    text = Text(f"failed: {row['what']}\n", style="red")
    for column, problem in row["problems"].items():
        text.append(f"  {column}: {' '.join(problem.split())[:400]}\n", style="default")
    return text.append(f"  {repeat} --set only={row['number']}", style="dim")


def run(case: BenchCase, settings: Settings, display: Display) -> Iterator[Result]:
    job = settings.job_of(case)
    trials = planned(job)
    display.start(case.name)
    rows = []
    for outcome in run_trials(trials):
        row = describe(outcome, judge(outcome, timeout_of(outcome.trial)))
        rows.append(row)
        display.update(f"{row['kind']} over {row['over']}", len(rows), len(trials))
        if not row["passed"]:
            display.show(failure_text(row, repeat_command(job)))
    yield {"case": case.name, "seed": job.seed, "trials": rows}
    if failed := sum(not row["passed"] for row in rows):
        raise LaunchError(f"{failed} of {len(rows)} trials failed.")


def by_cell(rows: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str, list[dict[str, Any]]]]:
    """Kind of fault, transport, and their trials."""
    for kind, over in plan.cells((*plan.KINDS, *plan.MUTANTS), plan.OVER):
        if cell := [row for row in rows if (row["kind"], row["over"]) == (kind, over)]:
            yield kind, over, cell


def _cells_of_row(kind: str, over: str, rows: Sequence[dict[str, Any]]) -> list[str | Text]:
    passed = sum(row["passed"] for row in rows)
    worst_s = max((row["detection_s"] for row in rows if row["detection_s"] is not None), default=None)
    nameable = [row for row in rows if row["nameable"]]
    named = sum("named" not in row["problems"] for row in nameable)
    reasons = Counter(column for row in rows for column in COLUMNS if column in row["problems"])
    return [
        kind,
        over,
        str(len(rows)),
        Text(str(passed), style="green" if passed == len(rows) else "red"),
        "-" if worst_s is None else f"{worst_s:.2f}",
        f"{named}/{len(nameable)}" if nameable else "-",
        Text(", ".join(f"{count} {column}" for column, count in reasons.items()), style="red"),
    ]


def table(result: Result) -> Table:
    """Trials by kind of fault and transport."""
    rows = result["trials"]
    took_min = sum(row["took_s"] for row in rows) / 60
    title = f"{len(rows)} trials, seed {result['seed']}, {took_min:.1f} min"
    table = plain_table(title, "fault", "trials", "passed", "worst\ns", "named", "failures", second="over")
    table.columns[-1].justify = "left"
    for kind, over, cell in by_cell(rows):
        table.add_row(*_cells_of_row(kind, over, cell))
    table.add_section()
    table.add_row(*_cells_of_row("all", "", rows))
    return table


def draw(results: Sequence[Result]) -> Figure:
    """A point per trial: how long the ranks took to notice the fault."""
    cells = [(f"{kind} over {over}", cell) for kind, over, cell in by_cell(results[0]["trials"])]
    figure, axes = panels(1, 1, 6.0, 1.4 + 0.25 * len(cells))
    axis = axes[0][0]
    for place, (_, cell) in enumerate(cells):
        times_s = [row["detection_s"] for row in cell if row["detection_s"] is not None]
        axis.plot(times_s, [place] * len(times_s), "o", color=COLORS["ours"], alpha=0.4)
    axis.set_yticks(range(len(cells)), [name for name, _ in cells])
    axis.invert_yaxis()
    finish_panel(axis, "from the fault to the last rank's error", "s")
    return figure


CASE = BenchCase(
    name="chaos",
    title="random faults in small training jobs, and how the other ranks react",
    models=(),
    caps_mb=(),
    takes_caps=False,
    options=OPTIONS,
    run=run,
    table=table,
    draw=draw,
    note=(
        "worst: seconds from the fault to the last rank's error (over torchft, to its first step without the lost "
        "replica); '-' if the job must continue. named: trials whose errors named the right rank, of those in which "
        "ranks can know it."
    ),
)
