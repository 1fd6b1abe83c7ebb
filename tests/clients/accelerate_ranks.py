"""Starts the jobs of accelerate_jobs.py and transformers_jobs.py, or an example, on two ranks by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str, timeout_s: float = 140) -> subprocess.CompletedProcess[str]:
    """Two ranks on CPU, one thread each, without a network."""
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


class Results:
    """What the ranks found in each job, with torch's class and ours."""

    def __init__(self, script: str, folder: Path, *arguments: str, timeout_s: float = 140) -> None:
        done = torchrun(f"tests/clients/{script}", str(folder), *arguments, timeout_s=timeout_s)
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
