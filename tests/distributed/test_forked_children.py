"""Children that a rank forks: they end at once, whatever the rank's threads and locks were at, and it goes on."""

import json
import subprocess
import sys

import pytest

ENDS_S = 16.0  # Python's own end with torch takes seconds on a busy machine
RUN_S = 180.0

pytestmark = pytest.mark.beyond_torch("the monitors of waits are ours")


@pytest.mark.parametrize("transport", ["shm", pytest.param("c10d", marks=pytest.mark.thorough)])
def test_forked_children_end_and_the_rank_goes_on(transport, tmp_path):
    command = [sys.executable, "-m", "tests.distributed.forked_children", transport, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        for rank in ranks:
            printed, _ = rank.communicate(timeout=RUN_S)
            assert rank.returncode == 0
            for child, (seconds, exit_code) in json.loads(printed).items():
                assert exit_code == 0, child
                assert seconds < ENDS_S, child
    finally:
        for rank in ranks:
            rank.kill()
