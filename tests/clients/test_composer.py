"""Composer's Trainer with torchddp's class: the same weights as with torch's, for each sync strategy."""

import importlib.util
from typing import Any

import pytest

from tests.clients.common import OURS, TORCHS, launch, saved_by_ranks

# Not pytest.importorskip: Composer imports torchvision, which only the worker stubs.
if importlib.util.find_spec("composer") is None:
    pytest.skip("Composer is not installed: make test-clients", allow_module_level=True)

STEPS = 4  # two epochs of two steps
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All results of one run, because importing Composer takes longer than training."""
    folder = tmp_path_factory.mktemp("composer")
    first, second = saved_by_ranks("tests.clients.composer_worker", folder, ranks=2, timeout_s=TIMEOUT_S - 10)
    assert first == second
    return first


pytestmark = pytest.mark.timeout(TIMEOUT_S)


def assert_trained(found: dict[str, Any], case: str, torchs: str, steps: int = STEPS, **more: Any) -> None:
    """Assert the number of steps by our reducer, and the weights of a run with torch's class."""
    expected = {"class": OURS, "weights": found[f"torch {torchs}"]["weights"], "steps": steps, **more}
    assert {name: found[case][name] for name in expected} == expected


def test_without_enable_it_is_torchs_class(found: dict[str, Any]) -> None:
    assert found["torch forced_sync 1"]["class"] == TORCHS and not found["enabled before"]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("strategy", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
def test_the_weights_equal_torchs(found: dict[str, Any], strategy: str, microbatches: int) -> None:
    case = f"{strategy} {microbatches}"
    assert_trained(found, case, case, STEPS * (microbatches if strategy == "multi_auto_sync" else 1))


def test_options_reach_the_class_and_end_with_the_with_block(found: dict[str, Any]) -> None:
    """So does an algorithm's declaration of unused parameters."""
    for transport, finds_unused in (("shm", True), ("c10d", False)):
        of_options = {"transport": transport, "find_unused_parameters": finds_unused}
        assert_trained(found, transport, "single_auto_sync 1", **of_options)


def test_afterwards_composer_is_unchanged(found: dict[str, Any]) -> None:
    assert found["restored"] == {"same": True, "enabled": False, "class": TORCHS}


def test_install_reaches_composer_too(found: dict[str, Any]) -> None:
    assert_trained(found, "install", "single_auto_sync 4")


def test_an_unknown_option_is_named(found: dict[str, Any]) -> None:
    assert found["unknown"].startswith("TypeError") and "'transprot'" in found["unknown"]
    assert "transport" in found["unknown"]


@pytest.mark.slow
def test_the_example_trains() -> None:
    done = launch("-m", "tests.clients.composer_stubs", "examples/train_composer.py", "--microbatch", "4", ranks=2)
    assert "torchddp.ddp.module: 100% right, 4 epochs; torchddp reduced 32 steps" in done.stdout
