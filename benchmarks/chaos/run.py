"""Runs the planned trials one after another and builds the document."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from typing import Any

import torch._dynamo  # noqa: F401  # imported once: the constructor of DDP would import it again in each rank
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.chaos import plan, servers
from benchmarks.chaos.judge import Verdict, expect, judge
from benchmarks.chaos.launch import run_trial
from benchmarks.chaos.leaks import adopt_orphans
from benchmarks.chaos.outcome import Outcome
from benchmarks.chaos.plan import Trial, cells, make_plan
from benchmarks.chaos.replica import run_replica
from benchmarks.chaos.report import failure_text, render
from benchmarks.chaos.worker import run_rank, timeout_of
from torchddp.harness.machine import new_document
from torchddp.harness.variants import ArgumentError


@dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    trials: int
    seed: int
    kinds: tuple[str, ...]
    over: tuple[str, ...]
    world_sizes: tuple[int, ...]
    only: int | None = None

    @property
    def command(self) -> str:
        """The command that reproduces this plan."""
        return (
            f"python -m benchmarks.chaos --trials {self.trials} --seed {self.seed} --kinds {','.join(self.kinds)} "
            f"--over {','.join(self.over)} --world-sizes {','.join(map(str, self.world_sizes))}"
        )


def describe(outcome: Outcome, verdict: Verdict) -> dict[str, Any]:
    """A trial's entry in the document."""
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


def _without_torchft(settings: Settings) -> tuple[Settings, list[str]]:
    if plan.TORCHFT not in settings.over:
        return settings, []
    if importlib.util.find_spec("torchft") is not None:
        import torchft  # noqa: F401  # once here rather than in each replica

        return settings, []
    rest = tuple(over for over in settings.over if over != plan.TORCHFT)
    if not rest:
        raise ArgumentError("--over torchft needs torchft, which is not installed here.")
    return replace(settings, over=rest), ["torchft, which is not installed here"]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn between trials, not by a thread: a rank forked while a thread holds a lock would wait for it forever.
    return Progress(*columns, console=console, transient=True, auto_refresh=False)


def run(settings: Settings, command: str, console: Console) -> dict[str, Any]:
    """Runs all trials, prints failures and the table, returns the document. Don't run a backward pass before."""
    settings, left_out = _without_torchft(settings)
    if not cells(settings.kinds, settings.over):
        raise ArgumentError(f"No fault of kind {', '.join(settings.kinds)} works over {', '.join(settings.over)}.")
    trials = make_plan(settings.trials, settings.seed, settings.kinds, settings.over, settings.world_sizes)
    if settings.only is not None:
        trials = [trials[settings.only]]
    document = {**new_document(command, asdict(settings)), "left_out": left_out}
    with _progress(console) as progress:
        document["results"] = _run_all(trials, settings, progress)
    console.print(render(document))
    return document


def _run(trial: Trial, store_port: int) -> Outcome:
    if trial.over != plan.TORCHFT:
        return run_trial(trial, store_port, run_rank)
    with servers.lighthouse() as address:
        return run_trial(trial, store_port, run_replica, address)


def _run_all(trials: Sequence[Trial], settings: Settings, progress: Progress) -> list[dict[str, Any]]:
    adopt_orphans()
    # Otherwise the first launch would start it: a process that its trial leaves behind.
    resource_tracker.ensure_running()
    bar = progress.add_task("", total=len(trials))
    rows = []
    with servers.store() as store_port:
        for trial in trials:
            progress.update(bar, description=f"{trial.kind} over {trial.over}", refresh=True)
            outcome = _run(trial, store_port)
            row = describe(outcome, judge(outcome, timeout_of(trial)))
            if not row["passed"]:
                progress.console.print(failure_text(row, settings.command), soft_wrap=True)
            rows.append(row)
            progress.advance(bar)
    return rows
