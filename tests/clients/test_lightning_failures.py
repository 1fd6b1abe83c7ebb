"""A rank that raises ends the others within seconds, whatever started them."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed: make test-clients")

from tests.clients.common import launch

pytestmark = pytest.mark.timeout(600)

# Without fail_together the other rank would wait for the process group's timeout, 30 minutes, or Lightning's launcher
# would kill it without giving the reason.
WHY = "ValueError: the loss is not a number"


def _fail(folder: Path, run: str, rank: int, start_method: str = "popen") -> str:
    ended = launch("-m", "tests.clients.lightning_failure", folder, run, start_method, rank, timeout_s=500, check=False)
    assert ended.returncode != 0
    return ended.stderr


@pytest.mark.parametrize(
    ("run", "rank"),
    [("trainer", 1), pytest.param("sharded", 0, marks=pytest.mark.slow)],
)
def test_other_rank_says_why(tmp_path: Path, run: str, rank: int) -> None:
    said = _fail(tmp_path, run, rank)
    peer = (tmp_path / f"end_{1 - rank}.txt").read_text()
    assert peer.startswith(f"PeerFailedError: rank {rank} failed after step 3: {WHY}"), said[-4000:]
    assert (tmp_path / f"end_{rank}.txt").read_text().startswith(WHY)
    # Lightning's own clean-up has run, in the process of each rank.
    assert (tmp_path / f"error{1 - rank}.txt").read_text().startswith("PeerFailedError")


def test_a_checkpoint_is_finished(tmp_path: Path) -> None:
    """Rank 1 raises while rank 0 writes a checkpoint. Both stay until it is written, and then end."""
    said = _fail(tmp_path, "saving", 1)
    assert (tmp_path / "end_1.txt").read_text().startswith(WHY), said[-4000:]
    assert torch.load(tmp_path / "whole.ckpt", weights_only=False)["global_step"] == 2
    assert (tmp_path / "report").read_text().startswith(f"rank 0: rank 1 failed after step 2: {WHY}")


@pytest.mark.slow
@pytest.mark.parametrize(("run", "start_method"), [("trainer", "fork"), ("trainer", "spawn"), ("fabric", "fork")])
def test_processes_of_one_launcher(tmp_path: Path, run: str, start_method: str) -> None:
    """Here the launcher, a third process, raises the error of the first rank that ended."""
    said = _fail(tmp_path, run, 1, start_method)
    assert WHY in (tmp_path / "end_launcher.txt").read_text(), said[-4000:]
