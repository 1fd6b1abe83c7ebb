"""The class under test passes every named check, also on the device code path; every broken class fails several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.behaviors import BEHAVIORS, BEYOND_TORCH, results_of
from tests.harness import class_under_test, is_own_class
from tests.mutants import MUTANTS
from tests.mutations import CAUGHT_BY, IN_EXTENSION, NAME_ENV, build_mutated
from tests.programs import ROOT
from tests.whole_buckets import LargeInPlace, WholeBuckets

OWN_WAY = pytest.mark.beyond_torch("packs whole buckets in its own way")


@pytest.mark.parametrize(
    "kind", [class_under_test(), *(pytest.param(kind, marks=OWN_WAY) for kind in (WholeBuckets, LargeInPlace))]
)
def test_behaviors(kind, tmp_path):
    names = [name for name in BEHAVIORS if is_own_class() or name not in BEYOND_TORCH]
    results = results_of(kind, names, tmp_path)
    failed = "\n".join(f"{name}: {error}" for name, error in results.items() if error)
    assert not failed and list(results) == names, failed


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


def run_mutated(test: str, name: str, *options: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--reruns=0", *options, test]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, NAME_ENV: name}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("mutation", CAUGHT_BY, ids=lambda mutation: mutation.__name__)
@pytest.mark.thorough
def test_a_fault_of_the_package_is_caught(mutation):
    done = run_mutated(CAUGHT_BY[mutation], mutation.__name__, "-p", "tests.mutations")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr


@pytest.mark.parametrize("name", IN_EXTENSION)
def test_what_is_mutated_occurs_once(name):
    assert (ROOT / "csrc" / IN_EXTENSION[name].file).read_text().count(IN_EXTENSION[name].text) == 1


@pytest.mark.thorough
@pytest.mark.timeout(3000)
def test_faults_of_the_extension_are_caught(tmp_path, capsys):
    """All are compiled at once. Without one chosen, the tests pass."""
    build_mutated(ROOT, tmp_path)
    left = [name for name, mutation in IN_EXTENSION.items() if not fails(mutation.test, name, tmp_path)]
    with capsys.disabled():
        print(f"\n{len(IN_EXTENSION) - len(left)} of {len(IN_EXTENSION)} faults of the extension are caught")
    wrong = [test for test in {mutation.test for mutation in IN_EXTENSION.values()} if fails(test, "", tmp_path)]
    assert not left and not wrong, (left, wrong)


def fails(test: str, name: str, tree: Path) -> bool:
    done = run_mutated(test, name, cwd=tree)
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), done.stdout + done.stderr
    return done.returncode == pytest.ExitCode.TESTS_FAILED
