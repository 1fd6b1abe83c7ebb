"""torch needs no numpy, and neither does training with this package; nor its extras."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.beyond_torch("uses what only torchddp has")


@pytest.mark.slow
def test_everything_that_trains_without_numpy_and_the_extras(tmp_path):
    command = [sys.executable, "-m", "tests.distributed.without_numpy", str(tmp_path / "store")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(2)]
    try:
        for rank in ranks:
            printed, errors = rank.communicate(timeout=180)
            assert (rank.returncode, printed) == (0, "trained\n"), errors
    finally:
        for rank in ranks:
            rank.kill()
