"""Runs the programs of docs/integrations.md on two ranks, unmodified and without torchddp."""

import json
from pathlib import Path
from typing import Any

from tests.clients.common import launch

WITHOUT = ("torchddp.install()", "")


class Run:
    """A program's run on two ranks: results and output."""

    def __init__(self, heading: str, folder: Path, *replaced: tuple[str, str], under: tuple[str, ...] = ()) -> None:
        folder.mkdir()
        options = [word for change in replaced for word in ("--replace", *change)]
        done = launch(*under, "-m", "tests.clients.page_rank", heading, folder, *options, ranks=2)
        self.said = done.stdout + done.stderr
        self.ranks: list[dict[str, Any]] = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]

    def assert_trained(self, by: str, weights: str | None = None, steps: int = 0) -> None:
        """Assert both ranks' class, weights, and number of reductions by ours."""
        for rank in self.ranks:
            assert (rank["class"], rank["steps"]) == (by, steps)
            assert rank["weights"] == (weights or self.weights) != rank["start"]

    @property
    def weights(self) -> str:
        return self.ranks[0]["weights"]


def assert_same_as_torch(heading: str, folder: Path, *replaced: tuple[str, str], steps: int) -> Run:
    """Assert that the program's results are bitwise equal with our class and torch's; return the run with ours."""
    torchs = Run(heading, folder / "torch", WITHOUT, *replaced)
    torchs.assert_trained("torch")
    ours = Run(heading, folder / "ours", *replaced)
    ours.assert_trained("torchddp", torchs.weights, steps)
    return ours
