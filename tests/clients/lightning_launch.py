"""Runs a program of the Lightning tests in a process of its own, which starts the other rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of two ranks, each importing Lightning, on a machine that does other things too.
LIMIT_S = 500
SET_BY_LIGHTNING = ("LOCAL_RANK", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE")


def launch(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """``python -m module arguments``, to its end; TimeoutExpired if it hangs."""
    inherited = {key: value for key, value in os.environ.items() if key not in SET_BY_LIGHTNING}
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
    )
