"""Right loops of Accelerate hear nothing of docs/traps.md."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-clients")

pytestmark = [pytest.mark.timeout(300), pytest.mark.beyond_torch("tells of no traps")]


def test_right_loops_hear_nothing() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "-m", "tests.clients.traps_accelerate"],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("told []\n") == 2, done.stdout[-2000:]
