"""Plans of chaos runs, and the judge of their trials: what it passes, and mutants of every column that it must not."""

from typing import Any

import pytest

from benchmarks.chaos import plan
from benchmarks.chaos.judge import COLUMNS, expect, judge, names_rank
from benchmarks.chaos.outcome import HangReport, Outcome, RankOutcome, RankReport, StepRecord
from benchmarks.chaos.plan import KINDS, Trial, cells, make_plan

FAULT_S = 100.0
TIMEOUT_S = 3.0
CULPRIT = 1


def trial_of(kind: str, over: str = plan.SHM, **changes: Any) -> Trial:
    phase = plan.CONSTRUCTION if kind == plan.FULL else "forward"
    return Trial(0, kind, over, world_size=3, rank=CULPRIT, step=2, phase=phase, **changes)


def step_of(step: int, deviation: float = 0.0) -> StepRecord:
    return StepRecord(step, "same", "same" if deviation == 0 else "other", deviation)


def outcome_of(trial: Trial) -> Outcome:
    """One that is as it must be."""
    expected = expect(trial, TIMEOUT_S)
    ranks = []
    for rank in range(trial.world_size):
        report = RankReport(rank, transport="c10d" if trial.kind == plan.FULL else "shm")
        raises = rank in expected.must_raise or (rank, trial.kind) == (CULPRIT, plan.EXCEPTION)
        report.steps = [step_of(step) for step in range(trial.step if raises else plan.STEPS)]
        if raises:
            report.error_s = FAULT_S + 0.5
            report.error_types = ["TransportError", "RuntimeError"]
            report.error = f"TransportError: rank {rank}, step 3: rank {CULPRIT} died"
        elif trial.over == plan.TORCHFT and trial.kind != plan.SLOW:
            report.recovered_s = FAULT_S + 0.5
        ranks.append(RankOutcome(rank, report, exit_code=int(raises)))
    if trial.kind in (plan.KILL, plan.STOP):
        ranks[CULPRIT] = RankOutcome(CULPRIT, exit_code=-9)
    if trial.kind == plan.FULL:
        ranks[0].stderr = f"memory can't be shared: rank {CULPRIT}: no room for gradients"
    return Outcome(trial, ranks, FAULT_S)


def report_of(outcome: Outcome, rank: int) -> Any:
    return outcome.ranks[rank].report


def problems_of(outcome: Outcome) -> dict[str, str]:
    return judge(outcome, TIMEOUT_S).problems


@pytest.mark.parametrize(("kind", "over"), cells(KINDS, plan.OVER))
def test_what_is_right_passes(kind: str, over: str) -> None:
    verdict = judge(outcome_of(trial_of(kind, over)), TIMEOUT_S)
    assert verdict.ok, verdict.problems
    goes_on = kind in (plan.SLOW, plan.FULL) or (kind, over) == (plan.SOCKET, plan.SHM)
    assert verdict.detection_s == (None if goes_on else 0.5)


def no_error(outcome: Outcome) -> None:
    report = report_of(outcome, 2)
    report.error, report.error_types = "", []
    report.steps = [step_of(step) for step in range(plan.STEPS)]


ANOTHER = "TransportError: rank 0, step 3: rank 2 died after 1 s, bucket 1"
ANOTHER_REPORT = HangReport("rank 2 is stopped; rank 1 has waited 1 s", [2])
# By column, what spoils it: each alone.
MUTANTS: dict[str, list[Any]] = {
    "detected": [
        lambda outcome: setattr(outcome, "fault_s", None),
        no_error,
        lambda outcome: setattr(report_of(outcome, 2), "error_s", FAULT_S - 1),
        lambda outcome: setattr(report_of(outcome, 2), "error_types", ["KeyError"]),
    ],
    "in time": [lambda outcome: setattr(report_of(outcome, 0), "error_s", FAULT_S + 2.1)],
    "named": [
        lambda outcome: setattr(report_of(outcome, 0), "error", ANOTHER),
        lambda outcome: outcome.hang_reports.append(ANOTHER_REPORT),
    ],
    "ended": [
        lambda outcome: setattr(outcome.ranks[2], "hung", "neither result nor error"),
        lambda outcome: setattr(outcome.ranks[2], "report", None),
        lambda outcome: setattr(outcome.ranks[2], "exit_code", -6),
    ],
    "no leak": [lambda outcome: setattr(outcome, "leaks", ["process 77 (python)"])],
    "gradients": [
        lambda outcome: report_of(outcome, 2).steps.__setitem__(1, step_of(1, 1e-8)),
        lambda outcome: report_of(outcome, 2).steps.pop(),
    ],
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_mutant_fails_in_its_column(column: str) -> None:
    for mutate in MUTANTS[column]:
        outcome = outcome_of(trial_of(plan.KILL))
        mutate(outcome)
        assert list(problems_of(outcome)) == [column]


@pytest.mark.parametrize("kind", [plan.SLOW, plan.FULL])
def test_where_the_job_goes_on_an_error_is_a_fault(kind: str) -> None:
    for rank in range(3):
        outcome = outcome_of(trial_of(kind))
        report_of(outcome, rank).error = "TransportError: timed out"
        assert list(problems_of(outcome)) == ["detected"]


def test_a_stopped_rank_has_the_time_limit_and_a_margin() -> None:
    outcome = outcome_of(trial_of(plan.STOP, plan.GLOO))
    for beyond_s, problems in ((1.9, []), (2.1, ["in time"])):
        report_of(outcome, 0).error_s = FAULT_S + TIMEOUT_S + beyond_s
        assert list(problems_of(outcome)) == problems


def test_a_report_may_name_the_rank_for_all() -> None:
    outcome = outcome_of(trial_of(plan.STOP, plan.GLOO))
    for rank in (0, 2):
        report_of(outcome, rank).error = "TransportError: timed out; ranks 0, 1 and 2 have waited 1 s"
    assert list(problems_of(outcome)) == ["named"]
    outcome.hang_reports = [HangReport("rank 1 is stopped; ranks 0 and 2 have waited 1 s", [CULPRIT])]
    assert problems_of(outcome) == {}


def test_gradients_over_a_process_group_have_a_tolerance() -> None:
    outcome = outcome_of(trial_of(plan.KILL, plan.GLOO))
    for deviation in (1e-6, 1e-4, float("inf"), float("nan")):
        report_of(outcome, 0).steps[0] = step_of(0, deviation)
        assert list(problems_of(outcome)) == ([] if deviation == 1e-6 else ["gradients"])


def test_over_torchft_the_others_go_on_in_time() -> None:
    for mutate, column in (
        (lambda report: setattr(report, "recovered_s", None), "detected"),
        (lambda report: setattr(report, "recovered_s", FAULT_S + 11), "in time"),
        (lambda report: setattr(report, "error", "RuntimeError: no quorum"), "detected"),
        (lambda report: setattr(report, "steps", report.steps[:1]), "gradients"),
    ):
        for kind in (plan.KILL, plan.EXCEPTION):
            outcome = outcome_of(trial_of(kind, plan.TORCHFT))
            mutate(report_of(outcome, 2))
            assert column in problems_of(outcome)


def test_what_names_rank_1() -> None:
    naming = "rank 1 died", "Rank 1: no room", "ranks 0 and 1 have left", "ranks 0-2 wait", "ranks 0, 2, 1"
    naming += ("rank 1 is stopped; ranks 0 and 2 have waited 3 s",)
    others = "rank 11 died", "rank 0 of 11, step 1", "ranks 2-4 wait", "rank 1 has waited 3 s for rank 2", ""
    others += ("ranks 0-2 have waited 3 s",)
    assert [text for text in naming + others if names_rank(text, 1)] == list(naming)


def test_trials_are_those_of_the_seed_and_make_sense() -> None:
    trials = make_plan(300, 1)
    assert make_plan(300, 1) == trials != make_plan(300, 2)
    assert make_plan(20, 1) == trials[:20]
    assert [trial.number for trial in trials] == list(range(300))
    for trial in trials:
        assert 0 <= trial.rank < trial.world_size and trial.step < plan.STEPS - 1
        assert (trial.phase == plan.CONSTRUCTION) == (trial.kind == plan.FULL)
        assert trial.kind != plan.FULL or (trial.over == plan.SHM and "hook" not in trial.option)
    assert {t.shortage for t in trials if t.kind == plan.FULL} == set(plan.SHORTAGES)
