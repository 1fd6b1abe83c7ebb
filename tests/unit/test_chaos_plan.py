"""Plans of chaos runs: repeatable, complete, and only what makes sense."""

from __future__ import annotations

import pytest

from benchmarks.chaos import plan
from benchmarks.chaos.plan import KINDS, cells, make_plan
from benchmarks.chaos.report import table_of

TRIALS = make_plan(300, 1)


def test_a_seed_gives_the_same_trials_whatever_their_number() -> None:
    assert make_plan(300, 1) == TRIALS
    assert make_plan(20, 1) == TRIALS[:20]
    assert make_plan(300, 2) != TRIALS
    assert [trial.number for trial in TRIALS] == list(range(300))


def test_every_kind_and_transport_comes_about_as_often() -> None:
    counts = {cell: sum((t.kind, t.over) == cell for t in TRIALS) for cell in cells(KINDS, plan.OVER)}
    assert len(counts) == 14 and max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("over", [plan.SHM, plan.GLOO])
def test_everything_is_drawn(over: str) -> None:
    mine = [t for t in TRIALS if t.over == over and t.kind != plan.FULL]
    assert {t.phase for t in mine} == set(plan.PHASES)
    assert {t.world_size for t in mine} == set(plan.WORLD_SIZES)
    assert {t.bucket_cap_mb for t in mine} == set(plan.BUCKET_CAPS_MB)
    assert {t.gradient for t in mine if t.phase == "hook"} == set(range(plan.NUM_GRADIENTS))
    assert {t.option for t in mine} == set(plan.OPTIONS) - ({"own_hook"} if over == plan.GLOO else set())
    assert {t.step for t in mine} == set(range(plan.STEPS - 1))


def test_every_trial_makes_sense() -> None:
    for trial in TRIALS:
        assert 0 <= trial.rank < trial.world_size and trial.step < plan.STEPS - 1
        assert (trial.phase == plan.CONSTRUCTION) == (trial.kind == plan.FULL)
        assert trial.kind != plan.FULL or (trial.over == plan.SHM and "hook" not in trial.option)
    assert {t.shortage for t in TRIALS if t.kind == plan.FULL} == set(plan.SHORTAGES)


def test_nothing_to_run() -> None:
    with pytest.raises(ValueError, match="no trial of full over gloo"):
        make_plan(1, 1, [plan.FULL], [plan.GLOO])


def test_the_table_counts_what_failed_and_why() -> None:
    row = {"kind": "kill", "over": "shm", "passed": True, "problems": {}, "nameable": True, "detection_s": 0.5}
    rows = [
        {**row, "took_s": 1.0},
        {
            **row,
            "took_s": 1.0,
            "passed": False,
            "problems": {"named": "rank 0 ...", "ended": "..."},
            "detection_s": 1.25,
        },
        {**row, "took_s": 1.0, "over": "gloo", "nameable": False, "detection_s": None},
    ]
    table = table_of({"results": rows, "settings": {"seed": 1}})
    cells_by_row = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    assert cells_by_row == [
        ("kill", "shm", "2", "1", "1.25", "1/2", "1 named, 1 ended"),
        ("kill", "gloo", "1", "1", "-", "-", ""),
        ("all", "", "3", "2", "1.25", "1/2", "1 named, 1 ended"),
    ]
