"""The results of a module of jobs; and a fixture that resets the state of tests without ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.clients.common import saved_by_ranks


class Results:
    """Results by job and class: "torch" and "ours"."""

    def __init__(self, module: str, folder: Path) -> None:
        self.ranks = saved_by_ranks(module, folder, ranks=2, timeout_s=380)

    def ours(self, job: str, rank: int = 0) -> Any:
        return self.ranks[rank][job]["ours"]

    def torchs(self, job: str, rank: int = 0) -> Any:
        return self.ranks[rank][job]["torch"]

    def assert_same(self, job: str, steps: int) -> None:
        """Assert bitwise equal results of both classes, equal weights on both ranks, and ``steps`` steps by ours."""
        for rank in range(2):
            torchs = self.torchs(job, rank)
            assert (torchs["class"], torchs["steps"]) == ("torch", 0)
            assert self.ours(job, rank) == {**torchs, "class": "torchddp", "steps": steps}, f"rank {rank}"
        assert self.ours(job, 0)["weights"] == self.ours(job, 1)["weights"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate in this process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
