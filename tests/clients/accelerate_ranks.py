"""Starts the jobs of a module on two ranks; and what tests without ranks leave behind is reset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.clients.common import launch


class Results:
    """What the ranks found in each job, with torch's class and ours."""

    def __init__(self, jobs: str, folder: Path, *arguments: str, timeout_s: float = 140) -> None:
        done = launch("-m", jobs, folder, *arguments, ranks=2, timeout_s=timeout_s, check=False)
        files = [folder / f"rank{rank}.json" for rank in range(2)]
        self.ranks: list[dict[str, Any]] = [json.loads(f.read_text()) for f in files if f.exists()]
        errors = "\n".join(result["error"] for result in self.ranks if "error" in result)
        assert done.returncode == 0 and not errors, errors or done.stderr[-4000:]

    def ours(self, job: str, rank: int = 0) -> dict[str, Any]:
        return self.ranks[rank][job]["ours"]

    def torchs(self, job: str, rank: int = 0) -> dict[str, Any]:
        return self.ranks[rank][job]["torch"]

    def assert_same(self, job: str, steps: int) -> None:
        """The same bits with both classes, and the same weights on both ranks; our reducer ran ``steps`` times."""
        for rank in range(2):
            ours, torchs = self.ours(job, rank), self.torchs(job, rank)
            assert (torchs.pop("class", "torch"), ours.pop("class", "torchddp")) == ("torch", "torchddp")
            assert (torchs.pop("steps"), ours.pop("steps")) == (0, steps)
            assert ours == torchs, f"rank {rank}"
        assert self.ours(job, 0)["weights"] == self.ours(job, 1)["weights"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate in this process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
