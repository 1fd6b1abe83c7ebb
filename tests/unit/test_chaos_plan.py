"""Plans of chaos runs: repeatable, complete, and only what makes sense."""

from __future__ import annotations

from benchmarks.chaos import plan
from benchmarks.chaos.plan import make_plan

TRIALS = make_plan(300, 1)


def test_trials_are_those_of_the_seed_and_make_sense() -> None:
    assert make_plan(300, 1) == TRIALS
    assert make_plan(20, 1) == TRIALS[:20]
    assert make_plan(300, 2) != TRIALS
    assert [trial.number for trial in TRIALS] == list(range(300))
    for trial in TRIALS:
        assert 0 <= trial.rank < trial.world_size and trial.step < plan.STEPS - 1
        assert (trial.phase == plan.CONSTRUCTION) == (trial.kind == plan.FULL)
        assert trial.kind != plan.FULL or (trial.over == plan.SHM and "hook" not in trial.option)
    assert {t.shortage for t in TRIALS if t.kind == plan.FULL} == set(plan.SHORTAGES)
