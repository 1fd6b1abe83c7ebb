"""Every broken class is caught by the tests of torch's behavior."""

import os
import re
import subprocess
import sys

import pytest

from tests.harness import CLASS_ENV
from tests.mutants import IN_CLASS
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
