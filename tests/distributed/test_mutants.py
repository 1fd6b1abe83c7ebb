"""The suite notices broken classes: every mutant fails at least three named checks, the true class none."""

import pytest

from tests.behaviours import BEHAVIOURS, read_logs, run_behaviours
from tests.harness import is_own_class, run_outcomes
from tests.mutants import MUTANTS

WORLD_SIZE = 2
LEAST_FAILURES = 3
ENOUGH_FAILURES = 6  # after so many there is no need to go on
# A mutant may make a rank wait for one that never comes; the true class gets the harness's usual patience.
MUTANT_TIMEOUT_S = 4.0
# A mutant is only evidence if it still does something right: it must fail for its bug, not because it cannot be built.
CONTROLS = ["second_comm_hook_is_refused", "explicit_copy_is_honoured", "bucket_view_option_is_shown"]


def _run(ddp_class, names, tmp_path, **options):
    """check -> error or None, going on with the next check after one that took a rank down."""
    results = {}
    left = list(names)
    while left:
        log = tmp_path / f"log_{len(left)}_"
        outcomes = run_outcomes(
            run_behaviours, WORLD_SIZE, ddp_class, left, log, *options.values(), timeout=100.0, straggler_s=2.0
        )
        results.update(read_logs(log, WORLD_SIZE))
        if all(outcome.ok for outcome in outcomes) or not any(name in results for name in left):
            break
        left = [name for name in left if name not in results]
    return results


def _failures(results):
    return {name for name, error in results.items() if error}


@pytest.mark.thorough
def test_true_class_passes_all_checks_in_one_process(ddp_class, tmp_path):
    """The control: run exactly as the mutants are, the true class fails nothing."""
    names = [b.name for b in BEHAVIOURS.values() if is_own_class() or not b.beyond_torch]
    results = _run(ddp_class, names, tmp_path)
    assert results.keys() == set(names)
    assert not _failures(results), "\n".join(f"{n}:\n{error}" for n, error in results.items() if error)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.thorough
def test_mutant_is_caught(name, tmp_path):
    names = CONTROLS + [n for n in BEHAVIOURS if n not in CONTROLS]
    options = {"timeout_s": MUTANT_TIMEOUT_S, "enough_failures": ENOUGH_FAILURES}
    results = _run(MUTANTS[name], names, tmp_path, **options)
    failed = _failures(results)
    assert len(failed) >= LEAST_FAILURES, f"only {sorted(failed)} notice {name}"
    assert not set(CONTROLS) <= failed, f"{name} fails everything: it is no test of the suite"
