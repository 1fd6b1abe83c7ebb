"""Accelerate and the Trainer as they are, after torchddp.install(): the same bits by our reducer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-clients")
pytest.importorskip("torchddp.integrations.install")

from tests.clients.accelerate_ranks import Results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torch("is not tested here")]


def test_accelerate_under_install(tmp_path: Path) -> None:
    jobs = {"plain": 10, "accumulation": 6, "bf16": 10, "power_sgd_hook": 10, "compiled": 10, "synced_late": 1}
    results = Results("accelerate_jobs.py", tmp_path, "--install", *jobs)
    for job, steps in jobs.items():
        results.assert_same(job, steps)


def test_the_trainer_under_install(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
    results = Results("transformers_jobs.py", tmp_path, "--install", "plain", "unused")
    for job in ("plain", "unused"):
        results.assert_same(job, steps=6)
