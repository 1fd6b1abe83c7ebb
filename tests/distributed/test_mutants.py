"""Every broken class, and every fault put into the package, is caught by the tests that are named for it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import CLASS_ENV
from tests.mutants import IN_CLASS
from tests.mutations import CAUGHT_BY, IN_EXTENSION, NAME_ENV, build_mutated
from tests.programs import ROOT

LEAST_FAILURES = 2


@pytest.mark.parametrize("name", IN_CLASS)
@pytest.mark.thorough
def test_a_broken_class_is_caught(name):
    """By several tests, but not by all: it must fail because of its fault, not because it can't be constructed."""
    command = [sys.executable, "-m", "pytest", "-q", "--reruns=0", "tests/parity/test_behavior.py"]
    environment = {**os.environ, CLASS_ENV: f"tests.mutants.{name}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    failed, passed = (int(re.findall(rf"(\d+) {outcome}", done.stdout)[-1]) for outcome in ("failed", "passed"))
    assert failed >= LEAST_FAILURES and passed >= LEAST_FAILURES, done.stdout


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
