"""The chaos benchmark: its plan of trials, the judge of their outcomes, and its search for leaks."""

import socket
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.chaos import plan
from benchmarks.chaos.judge import COLUMNS, expect, judge, names_rank
from benchmarks.chaos.leaks import Inventory, footprint, open_sockets
from benchmarks.chaos.outcome import Footprint, HangReport, Outcome, RankOutcome, RankReport, StepRecord
from benchmarks.chaos.plan import EXCEPTION, FULL, GLOO, KILL, KINDS, SHM, SLOW, STOP, TORCHFT, Trial, cells, make_plan

FAULT_S = 100.0
TIMEOUT_S = 3.0
CULPRIT = 1


def trial_of(kind: str, over: str) -> Trial:
    phase = plan.CONSTRUCTION if kind == FULL else "forward"
    return Trial(0, kind, over, world_size=3, rank=CULPRIT, step=2, phase=phase)


def steps(count: int, deviation: float = 0.0) -> list[StepRecord]:
    """Steps of which the last deviates."""
    off = StepRecord(count - 1, "same", "same" if deviation == 0 else "other", deviation)
    return [*(StepRecord(step, "same", "same", 0.0) for step in range(count - 1)), off]


def outcome_of(trial: Trial) -> Outcome:
    """A correct outcome of the trial."""
    expected = expect(trial, TIMEOUT_S)
    ranks = []
    for rank in range(trial.world_size):
        report = RankReport(rank, transport="c10d" if trial.kind == FULL else "shm")
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
    if trial.kind == FULL:
        ranks[0].stderr = f"memory can't be shared: rank {CULPRIT}: no room for gradients"
    return Outcome(trial, ranks, FAULT_S)


@pytest.mark.parametrize(("kind", "over"), cells(KINDS, plan.OVER))
def test_a_correct_outcome_passes(kind: str, over: str) -> None:
    verdict = judge(outcome_of(trial_of(kind, over)), TIMEOUT_S)
    assert verdict.ok, verdict.problems
    goes_on = kind in (SLOW, FULL) or (kind, over) == (plan.SOCKET, SHM)
    assert verdict.detection_s == (None if goes_on else 0.5)


Change = Callable[[Outcome], None]


def changed(**values: Any) -> Change:
    return lambda outcome: outcome.__dict__.update(values)


def rank_changed(rank: int, **values: Any) -> Change:
    return lambda outcome: outcome.ranks[rank].__dict__.update(values)


def report_changed(rank: int, **values: Any) -> Change:
    return lambda outcome: outcome.ranks[rank].report.__dict__.update(values)


ANOTHER = "TransportError: rank 0, step 3: rank 2 died after 1 s, bucket 1"
UNNAMED = "TransportError: timed out; ranks 0, 1 and 2 have waited 1 s"
ANOTHER_REPORT = HangReport("rank 2 is stopped; rank 1 has waited 1 s", [2])
RIGHT_REPORT = HangReport("rank 1 is stopped; ranks 0 and 2 have waited 1 s", [CULPRIT])
# Changes to a correct outcome, with the column that then fails ("": none).
CHANGES = [
    ("detected", KILL, SHM, changed(fault_s=None)),
    ("detected", KILL, SHM, report_changed(2, error="", error_types=[], steps=steps(plan.STEPS))),
    ("detected", KILL, SHM, report_changed(2, error_s=FAULT_S - 1)),
    ("detected", KILL, SHM, report_changed(2, error_types=["KeyError"])),
    ("detected", SLOW, SHM, report_changed(0, error=UNNAMED)),
    ("detected", KILL, TORCHFT, report_changed(2, recovered_s=None)),
    ("detected", EXCEPTION, TORCHFT, report_changed(2, error="RuntimeError: no quorum", error_s=FAULT_S)),
    ("in time", KILL, SHM, report_changed(0, error_s=FAULT_S + 2.1)),
    ("", STOP, GLOO, report_changed(0, error_s=FAULT_S + TIMEOUT_S + 1.9)),
    ("in time", STOP, GLOO, report_changed(0, error_s=FAULT_S + TIMEOUT_S + 2.1)),
    ("named", KILL, SHM, report_changed(0, error=ANOTHER)),
    ("named", KILL, SHM, changed(hang_reports=[ANOTHER_REPORT])),
    ("named", STOP, GLOO, report_changed(2, error=UNNAMED)),
    ("ended", KILL, SHM, rank_changed(2, hung="neither result nor error")),
    ("ended", KILL, SHM, rank_changed(2, report=None)),
    ("ended", KILL, SHM, rank_changed(2, exit_code=-6)),
    ("no leak", KILL, SHM, changed(leaks=["process 77 (python)"])),
    ("gradients", KILL, SHM, report_changed(2, steps=steps(2, 1e-8))),
    ("gradients", KILL, SHM, report_changed(2, steps=steps(1))),
    ("", KILL, GLOO, report_changed(0, steps=steps(2, 1e-6))),
    ("gradients", KILL, GLOO, report_changed(0, steps=steps(2, 1e-4))),
    ("gradients", KILL, GLOO, report_changed(0, steps=steps(2, float("nan")))),
]


@pytest.mark.parametrize(("column", "kind", "over", "change"), CHANGES)
def test_a_wrong_outcome_fails_in_its_column(column: str, kind: str, over: str, change: Change) -> None:
    assert set(COLUMNS) <= {one[0] for one in CHANGES}
    outcome = outcome_of(trial_of(kind, over))
    change(outcome)
    assert list(judge(outcome, TIMEOUT_S).problems) == ([column] if column else [])


def test_texts_that_blame_rank_1_are_recognized() -> None:
    outcome = outcome_of(trial_of(STOP, GLOO))
    report_changed(2, error=UNNAMED)(outcome)
    outcome.hang_reports = [RIGHT_REPORT]
    assert judge(outcome, TIMEOUT_S).ok
    naming = "rank 1 died", "Rank 1: no room", "ranks 0 and 1 have left", "ranks 0-2 wait", "ranks 0, 2, 1"
    naming += ("rank 1 is stopped; ranks 0 and 2 have waited 3 s",)
    others = "rank 11 died", "rank 0 of 11, step 1", "ranks 2-4 wait", "rank 1 has waited 3 s for rank 2", ""
    others += ("ranks 0-2 have waited 3 s",)
    assert [text for text in naming + others if names_rank(text, 1)] == list(naming)


def test_a_plan_is_determined_by_its_seed_and_valid() -> None:
    trials = make_plan(300, 1)
    assert make_plan(20, 1) == trials[:20] != make_plan(20, 2)
    assert [trial.number for trial in trials] == list(range(300))
    for trial in trials:
        assert 0 <= trial.rank < trial.world_size and trial.step < plan.STEPS - 1, trial
        assert (trial.phase == plan.CONSTRUCTION) == (trial.kind == FULL), trial
        assert trial.kind != FULL or (trial.over == SHM and "hook" not in trial.option), trial
    assert {t.shortage for t in trials if t.kind == FULL} == set(plan.SHORTAGES)


def test_listening_sockets_are_leaks_until_they_are_closed() -> None:
    before = frozenset(open_sockets().values())
    inventory = Inventory()
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = footprint(before)
        assert len(mine.listening) == 1
        assert any("listening socket" in text for text in inventory.leaks([mine]))
        assert footprint(frozenset(open_sockets().values())) == Footprint()
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            assert footprint(before).listening == mine.listening  # connections do not listen
    assert inventory.leaks([mine]) == []
