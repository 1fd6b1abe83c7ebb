"""The suite notices broken classes: every mutant fails at least three named checks that the true class passes."""

import pytest

from tests.behaviours import BEHAVIOURS, results_of
from tests.mutants import MUTANTS

LEAST_FAILURES = 3
ENOUGH_FAILURES = 6  # after so many there is no need to go on
# A mutant may make a rank wait for one that never comes; the true class gets the harness's usual patience.
MUTANT_TIMEOUT_S = 4.0
# A mutant is only evidence if it still does something right: it must fail for its bug, not because it cannot be built.
CONTROLS = ["second_comm_hook_is_refused", "explicit_copy_is_honoured", "bucket_view_option_is_shown"]


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.thorough
def test_mutant_is_caught(name, tmp_path):
    names = CONTROLS + [n for n in BEHAVIOURS if n not in CONTROLS]
    results = results_of(MUTANTS[name], names, tmp_path, MUTANT_TIMEOUT_S, ENOUGH_FAILURES)
    failed = {check for check, error in results.items() if error}
    assert len(failed) >= LEAST_FAILURES, f"only {sorted(failed)} notice {name}"
    assert not set(CONTROLS) <= failed, f"{name} fails everything: it is no test of the suite"
