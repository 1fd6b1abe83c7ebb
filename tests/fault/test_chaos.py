"""Tests of the chaos suite: its trials pass, and deliberately wrong trials and outcomes fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.cases import CASES
from benchmarks.cases import chaos as chaos_case
from benchmarks.chaos import plan
from benchmarks.chaos.judge import COLUMNS, expect, judge
from benchmarks.chaos.outcome import Outcome, RankOutcome, RankReport, StepRecord
from benchmarks.chaos.plan import EXCEPTION, GLOO, KILL, SHM, SLOW, STOP, TORCHFT, Trial
from tests.unit.helpers import assert_refused
from torchddp.bench.cli import main

pytestmark = pytest.mark.beyond_torch("names neither the rank nor the bucket")


@pytest.fixture
def chaos(tmp_path):
    """A function that runs the case and returns the exit code, the trials, and the output."""

    def run(*options: str) -> tuple[int, list[dict], str]:
        path = tmp_path / "chaos.json"
        command = [sys.executable, "-m", "benchmarks", "--case", "chaos", "--seed", "3", "--json", str(path)]
        command += [word for option in options for word in ("--set", option)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert path.exists(), f"exit code {done.returncode}: {done.stderr}"
        (result,) = json.loads(path.read_text())["results"]
        return done.returncode, result["trials"], done.stdout

    return run


def untimely_aside(rows: list[dict]) -> set[str]:
    """The columns in which trials failed, except for the time that the ranks took."""
    return {column for row in rows for column in row["problems"]} - {"in time"}


@pytest.mark.slow
def test_nine_trials(chaos):
    """Every kind except a slow rank, once over every transport."""
    kinds = ",".join(kind for kind in plan.KINDS if kind != plan.SLOW)
    _, rows, said = chaos("trials=9", f"kinds={kinds}", "over=shm,gloo")
    assert not untimely_aside(rows), said
    assert len({(row["kind"], row["over"]) for row in rows}) == 9


def test_deliberately_wrong_trials_fail(chaos):
    """A rank that trains wrong weights, and a rank that leaves a process behind."""
    kinds = f"{plan.CORRUPT},{plan.ORPHAN}"
    code, rows, said = chaos("trials=2", f"kinds={kinds}", "over=shm", "world_sizes=2")
    assert code == 1
    corrupt, orphan = rows
    assert list(corrupt["problems"]) == ["gradients"], said
    assert list(orphan["problems"]) == ["no leak"] and "process" in orphan["problems"]["no leak"], said
    again = f"--seed 3 --set kinds={kinds} --set over=shm --set world_sizes=2 --set only=1"
    assert f"python -m benchmarks --case chaos {again}\n" in said


@pytest.mark.slow
def test_three_trials_over_torchft(chaos):
    pytest.importorskip("torchft")
    _, rows, said = chaos("trials=3", f"over={plan.TORCHFT}")
    assert not untimely_aside(rows), said
    assert {row["kind"] for row in rows} == {plan.KILL, plan.EXCEPTION, plan.SLOW}


def test_a_fault_that_no_transport_has_is_refused(capsys):
    arguments = ["--case", "chaos", "--set", "over=gloo", "--set"]
    assert_refused(partial(main, cases=CASES), [*arguments, "kinds=full"], "No fault of kind full works over", capsys)
    refused = partial(main, cases=CASES), [*arguments, "kinds=kill,flood"]
    assert_refused(*refused, "--set kinds: there is no 'flood'; choose from kill, stop,", capsys)


def test_a_missing_torchft_is_named(monkeypatch, capsys):
    monkeypatch.setattr(chaos_case, "OVER_HERE", (plan.SHM, plan.GLOO))
    refused = partial(main, cases=CASES), ["--case", "chaos", "--set", "over=shm,torchft"]
    assert_refused(*refused, "--set over=torchft needs torchft, which is not installed here.", capsys)


FAULT_S = 100.0
TIMEOUT_S = 3.0
CULPRIT = 1


def steps(count: int, deviation: float = 0.0) -> list[StepRecord]:
    """Steps of which the last deviates."""
    off = StepRecord(count - 1, "same", "same" if deviation == 0 else "other", deviation)
    return [*(StepRecord(step, "same", "same", 0.0) for step in range(count - 1)), off]


def outcome_of(trial: Trial) -> Outcome:
    """A correct outcome of the trial."""
    expected = expect(trial, TIMEOUT_S)
    ranks = []
    for rank in range(trial.world_size):
        report = RankReport(rank, transport="shm")
        raises = rank in expected.must_raise or (rank, trial.kind) == (CULPRIT, EXCEPTION)
        report.steps = steps(trial.step if raises else plan.STEPS)
        if raises:
            report.error_s = FAULT_S + 0.5
            report.error_types = ["TransportError", "RuntimeError"]
            report.error = f"TransportError: rank {rank}, step 3: rank {CULPRIT} died"
        elif trial.over == TORCHFT and trial.kind != SLOW:
            report.recovered_s = FAULT_S + 0.5
        ranks.append(RankOutcome(rank, report, exit_code=int(raises)))
    if trial.kind in (KILL, STOP):
        ranks[CULPRIT] = RankOutcome(CULPRIT, exit_code=-9)
    return Outcome(trial, ranks, FAULT_S)


Change = Callable[[Outcome], None]


def changed(**values: Any) -> Change:
    return lambda outcome: outcome.__dict__.update(values)


def report_changed(rank: int, **values: Any) -> Change:
    return lambda outcome: outcome.ranks[rank].report.__dict__.update(values)


ANOTHER = "TransportError: rank 0, step 3: rank 2 died after 1 s, bucket 1"
UNNAMED = "TransportError: timed out; ranks 0, 1 and 2 have waited 1 s"
# Changes to a correct outcome, with the column that then fails ("": none).
CHANGES = [
    ("detected", KILL, SHM, changed(fault_s=None)),
    ("detected", KILL, SHM, report_changed(2, error="", error_types=[], steps=steps(plan.STEPS))),
    ("detected", SLOW, SHM, report_changed(0, error=UNNAMED)),
    ("detected", KILL, TORCHFT, report_changed(2, recovered_s=None)),
    ("detected", EXCEPTION, TORCHFT, report_changed(2, error="RuntimeError: no quorum", error_s=FAULT_S)),
    ("", STOP, GLOO, report_changed(0, error_s=FAULT_S + TIMEOUT_S + 1.9)),
    ("in time", STOP, GLOO, report_changed(0, error_s=FAULT_S + TIMEOUT_S + 2.1)),
    ("named", KILL, SHM, report_changed(0, error=ANOTHER)),
    ("named", STOP, GLOO, report_changed(2, error=UNNAMED)),
    ("ended", KILL, SHM, lambda outcome: setattr(outcome.ranks[2], "hung", "neither result nor error")),
    ("no leak", KILL, SHM, changed(leaks=["process 77 (python)"])),
    ("gradients", KILL, SHM, report_changed(2, steps=steps(2, 1e-8))),
    ("", KILL, GLOO, report_changed(0, steps=steps(2, 1e-6))),
    ("gradients", KILL, GLOO, report_changed(0, steps=steps(2, 1e-4))),
]


@pytest.mark.parametrize(("column", "kind", "over", "change"), CHANGES)
def test_a_wrong_outcome_fails_in_its_column(column: str, kind: str, over: str, change: Change) -> None:
    assert set(COLUMNS) <= {one[0] for one in CHANGES}
    outcome = outcome_of(Trial(0, kind, over, world_size=3, rank=CULPRIT, step=2, phase="forward"))
    change(outcome)
    assert list(judge(outcome, TIMEOUT_S).problems) == ([column] if column else [])
