"""Ray Train with our engine: two CPU workers get the weights of torch's class, also after one died."""

import json
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: make test-clients")

from tests.clients import ray_driver
from tests.clients.common import OURS, TORCHS, launch
from tests.clients.ray_training import EPOCHS, STEPS

LIMIT_S = 900  # seven runs, each of which starts its own processes, on a machine that may be busy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S), pytest.mark.beyond_torch("is not tested here")]


class Found:
    """Results of each case's workers and of the driver, and what was left afterwards."""

    def __init__(self, folder: Path, before: set[str]) -> None:
        self.folder = folder
        self.driver: dict[str, Any] = json.loads((folder / "driver.json").read_text())
        end = time.monotonic() + 30
        while (left := self.left(before)) and time.monotonic() < end:
            time.sleep(0.5)
        self.left_over = left

    @staticmethod
    def left(before: set[str]) -> list[str]:
        return ray_driver.processes() + sorted({*os.listdir("/dev/shm")} - before)

    def workers(self, case: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{case}.{rank}.json").read_text()) for rank in range(2)]

    def assert_trained(self, case: str, by: str, first: int = 0, **more: Any) -> None:
        """Assert that both workers trained from this epoch on, with the weights of torch's class."""
        (weights,) = {worker["weights"] for worker in self.workers("torch")}
        steps = STEPS * (EPOCHS - first) if by == OURS else 0
        for worker in self.workers(case):
            expected = {"class": by, "weights": weights, "first epoch": first, "steps": steps, **more}
            assert {name: worker[name] for name in expected} == expected


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as short:
        patch.setenv(ray_driver.MARK, uuid.uuid4().hex)
        patch.setenv("RAY_TMPDIR", short)  # it holds sockets, whose paths must be short
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
        before = set(os.listdir("/dev/shm"))
        launch("-m", "tests.clients.ray_driver", folder, timeout_s=LIMIT_S - 60)
        yield Found(folder, before)


def test_install_in_the_training_function(found: Found) -> None:
    found.assert_trained("torch", TORCHS)
    found.assert_trained("install", OURS, transport="auto")


def test_the_variable_and_an_import_in_the_workers(found: Found) -> None:
    """prepare_model passes torchddp's own options on."""
    found.assert_trained("variable", OURS, transport="c10d")


def test_install_in_the_driver_does_not_reach_the_workers(found: Found) -> None:
    """Nor does the variable if the workers don't import torchddp."""
    found.assert_trained("elsewhere", TORCHS)


@pytest.mark.parametrize("death", ["exit", "kill"])
def test_a_worker_that_dies_is_restarted(found: Found, death: str) -> None:
    """It resumes from Ray's last checkpoint and ends like an uninterrupted run; the other names the dead one."""
    first = found.workers(death)[0]["first epoch"]
    assert first in (1, 2)
    found.assert_trained(death, OURS, first)
    said = (found.folder / f"{death}.0.failed").read_text()
    assert said.startswith("TransportError: rank 1 died") and "rank 0, step " in said


def test_nothing_is_left(found: Found) -> None:
    """Neither processes nor shared memory."""
    assert found.driver["processes"] > 0
    assert found.left_over == []


def test_the_page(found: Found) -> None:
    assert found.driver["page"]["steps of torchddp"] == 12
