"""Spark's TorchDistributor: install() in the function that it runs, with ranks in the driver or one in each task."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.common import launch
from tests.programs import CLAIM

if importlib.util.find_spec("pyspark") is None:
    pytest.skip("Spark is not installed: make test-clients", allow_module_level=True)
if shutil.which("java") is None:
    pytest.skip("Spark needs a JVM: apt-get install default-jre-headless", allow_module_level=True)

DRIVER = "torchddp.install() only affects this process, not Spark's workers"
TIMEOUT_S = 240

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def run(where: str, ranks: int, folder: Path, *options: str, **more: str) -> tuple[str, list[dict[str, Any]]]:
    """Run the job; return the output of driver and ranks, and the ranks' results."""
    command = ("-m", "tests.clients.spark_job", where, ranks, folder, *options)
    done = launch(*command, timeout_s=TIMEOUT_S - 10, SPARK_LOCAL_IP="127.0.0.1", **more)
    said = done.stdout + done.stderr
    assert "done by rank" in said, said
    return said, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def assert_announced_once(found: list[dict[str, Any]]) -> None:
    """Count in the ranks' logs, because Spark prints tasks' lines twice if they share the driver's terminal."""
    assert [sum(CLAIM in message for message in rank["said"]) for rank in found] == [1, *[0] * (len(found) - 1)]


def test_ranks_of_the_driver(tmp_path: Path) -> None:
    said, found = run("driver", 2, tmp_path, "install")
    for rank in found:
        assert rank["same"] and rank["steps"] == 3 and rank["transport"] == "shm"
        assert not rank["installed before"]  # install() in the driver has no effect
    assert_announced_once(found)
    assert said.count(DRIVER) == 1


def test_a_rank_in_each_task(tmp_path: Path) -> None:
    said, found = run("tasks", 2, tmp_path)
    for rank in found:
        assert rank["local"] == ["0", "1"]  # as if each had its own host
        assert rank["same"] and rank["steps"] == 3 and rank["transport"] == "shm"
    assert_announced_once(found)
    assert DRIVER not in said


@pytest.mark.slow
def test_the_variable_installs_on_the_ranks(tmp_path: Path) -> None:
    _, found = run("driver", 2, tmp_path, TORCHDDP_INSTALL="1")
    assert [rank["installed before"] for rank in found] == [True, True]
