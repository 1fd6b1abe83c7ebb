"""Composer's Trainer on torchddp's class: the same weights as on torch's, for each of its sync strategies."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from typing import Any

import pytest

from tests.clients.common import OURS, TORCHS, launch

# Not pytest.importorskip: Composer imports torchvision, which the worker stands in for.
if importlib.util.find_spec("composer") is None:
    pytest.skip("Composer is not installed: make test-clients", allow_module_level=True)

STEPS = 4  # two epochs of two
TIMEOUT_S = 240


def torchrun(*command: object) -> subprocess.CompletedProcess[str]:
    return launch(*command, ranks=2, timeout_s=TIMEOUT_S - 10)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All that the worker has found, in one run: importing Composer costs more than the training."""
    path = tmp_path_factory.mktemp("composer") / "found.json"
    torchrun("-m", "tests.clients.composer_worker", path)
    return json.loads(path.read_text())


pytestmark = pytest.mark.timeout(TIMEOUT_S)


def test_without_enable_it_is_torchs_class(found: dict[str, Any]) -> None:
    assert found["torch"] == {"class": TORCHS, "enabled": False}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("strategy", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
def test_the_weights_are_those_of_torchs_class(found: dict[str, Any], strategy: str, microbatches: int) -> None:
    case = found[f"{strategy} {microbatches}"]
    assert case["same"] and case["class"] == OURS
    assert case["steps"] == STEPS * (microbatches if strategy == "multi_auto_sync" else 1)  # in our reducer


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_options_reach_the_class_and_go_with_the_with(found: dict[str, Any], transport: str) -> None:
    case = found[transport]
    assert case["same"] and case["class"] == OURS and case["transport"] == transport and case["steps"] == STEPS


def test_what_an_algorithm_says_of_unused_parameters_reaches_the_class(found: dict[str, Any]) -> None:
    assert [found[case]["find_unused_parameters"] for case in ("shm", "c10d")] == [True, False]


def test_afterwards_composer_is_as_it_was(found: dict[str, Any]) -> None:
    assert found["restored"] == {"same": True, "enabled": False, "class": TORCHS}


def test_install_reaches_composer_too(found: dict[str, Any]) -> None:
    assert found["install"]["same"] and found["install"]["class"] == OURS and found["install"]["steps"] == STEPS


def test_an_unknown_option_is_named(found: dict[str, Any]) -> None:
    assert "'transprot'" in found["unknown"] and "transport" in found["unknown"]


@pytest.mark.slow
def test_the_example_trains() -> None:
    done = torchrun("-m", "tests.clients.composer_stubs", "examples/train_composer.py", "--microbatch", "4")
    assert "torchddp.ddp.module: 100% right after 4 epochs; our reducer finished 32" in done.stdout
