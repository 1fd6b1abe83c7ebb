"""Like torch, training with this package needs neither numpy nor the extras."""

import sys

import pytest

from tests.programs import clean_environment, run_together

pytestmark = pytest.mark.beyond_torch("uses what only torchddp has")


@pytest.mark.slow
def test_everything_that_trains_without_numpy_and_the_extras(tmp_path):
    command = [sys.executable, "-m", "tests.distributed.without_numpy", str(tmp_path / "store")]
    for rank in run_together([[*command, str(rank)] for rank in range(2)], [clean_environment()] * 2, 500):
        assert (rank.returncode, rank.stdout) == (0, "trained\n"), rank.stderr
