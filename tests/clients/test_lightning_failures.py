"""A rank that raises ends the others within seconds, whatever started them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed: make test-clients")

from tests.clients.common import launch

pytestmark = pytest.mark.timeout(600)

# Without fail_together the other rank would wait for the process group's timeout, 30 minutes, or Lightning's launcher
# would kill it without giving the reason.
WHY = "ValueError: the loss is not a number"


def _fail(folder: Path, strategy: str, rank: int) -> str:
    ended = launch("-m", "tests.clients.lightning_failure", folder, strategy, rank, timeout_s=500, check=False)
    assert ended.returncode != 0
    return ended.stderr


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("torchddp", 1), pytest.param("torchddp_sharded", 0, marks=pytest.mark.slow)],
)
def test_other_rank_says_why(tmp_path: Path, strategy: str, rank: int) -> None:
    said = _fail(tmp_path, strategy, rank)
    peer = (tmp_path / f"end_{1 - rank}.txt").read_text()
    assert peer.startswith(f"PeerFailedError: rank {rank} failed at step 4: {WHY}"), said[-4000:]
    assert (tmp_path / f"end_{rank}.txt").read_text().startswith(WHY)
    # Lightning's own clean-up has run, in the process of each rank.
    assert (tmp_path / f"error{1 - rank}.txt").read_text().startswith("PeerFailedError")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["torchddp_fork", "torchddp_spawn", "fabric:torchddp_fork"])
def test_processes_of_one_launcher(tmp_path: Path, strategy: str) -> None:
    """Here the launcher, a third process, raises the error of the first rank that ended."""
    said = _fail(tmp_path, strategy, 1)
    assert WHY in (tmp_path / "end_launcher.txt").read_text(), said[-4000:]
