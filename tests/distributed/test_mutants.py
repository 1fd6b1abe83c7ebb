"""The suite catches broken classes: every mutant fails at least three named checks that the real class passes."""

import pytest

from tests.behaviors import BEHAVIORS, results_of
from tests.mutants import MUTANTS

LEAST_FAILURES = 3
ENOUGH_FAILURES = 6  # stop after this many
# A mutant may make a rank wait forever; the real class gets the harness's usual timeout.
MUTANT_TIMEOUT_S = 4.0
# A mutant must pass some check: it must fail because of its bug, not because it cannot be constructed.
CONTROLS = ["second_comm_hook_is_refused", "explicit_copy_is_honored", "bucket_view_option_is_shown"]


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.thorough
def test_mutant_is_caught(name, tmp_path):
    names = CONTROLS + [n for n in BEHAVIORS if n not in CONTROLS]
    results = results_of(MUTANTS[name], names, tmp_path, MUTANT_TIMEOUT_S, ENOUGH_FAILURES)
    failed = {check for check, error in results.items() if error}
    assert len(failed) >= LEAST_FAILURES, f"only {sorted(failed)} notice {name}"
    assert not set(CONTROLS) <= failed, f"{name} fails all checks, so it proves nothing"
