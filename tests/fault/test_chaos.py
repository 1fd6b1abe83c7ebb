"""Tests of the chaos suite: its trials pass, and deliberately wrong trials fail."""

import json
import subprocess
import sys

import pytest

from benchmarks.chaos import plan

pytestmark = pytest.mark.beyond_torch("names neither the rank nor the bucket")


@pytest.fixture
def chaos(tmp_path):
    """A function that runs the case and returns the exit code, the trials, and the output."""

    def run(*options: str) -> tuple[int, list[dict], str]:
        path = tmp_path / "chaos.json"
        command = [sys.executable, "-m", "benchmarks", "--case", "chaos", "--seed", "3", "--json", str(path)]
        command += [word for option in options for word in ("--set", option)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert path.exists(), f"exit code {done.returncode}: {done.stderr}"
        (result,) = json.loads(path.read_text())["results"]
        return done.returncode, result["trials"], done.stdout

    return run


def untimely_aside(rows: list[dict]) -> set[str]:
    """The columns in which trials failed, except for the time that the ranks took."""
    return {column for row in rows for column in row["problems"]} - {"in time"}


@pytest.mark.slow
def test_nine_trials(chaos):
    """Every kind except a slow rank, once over every transport."""
    kinds = ",".join(kind for kind in plan.KINDS if kind != plan.SLOW)
    _, rows, said = chaos("trials=9", f"kinds={kinds}", "over=shm,gloo")
    assert not untimely_aside(rows), said
    assert len({(row["kind"], row["over"]) for row in rows}) == 9


@pytest.mark.slow
def test_deliberately_wrong_trials_fail(chaos):
    """A rank that trains wrong weights, and a rank that leaves a process behind."""
    kinds = f"{plan.CORRUPT},{plan.ORPHAN}"
    code, rows, said = chaos("trials=2", f"kinds={kinds}", "over=shm", "world_sizes=2")
    assert code == 1
    corrupt, orphan = rows
    assert list(corrupt["problems"]) == ["gradients"], said
    assert list(orphan["problems"]) == ["no leak"] and "process" in orphan["problems"]["no leak"], said
    again = f"--seed 3 --set kinds={kinds} --set over=shm --set world_sizes=2 --set only=1"
    assert f"python -m benchmarks --case chaos {again}\n" in said
