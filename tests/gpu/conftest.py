"""Marks and skips the tests of this folder; one process group of one rank for those that share it."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from tests.gpu.device import chosen_device, make_deterministic, why_not
from tests.harness import process_group

FOLDER = Path(__file__).parent
# Tests with one of these fixtures run where the fixture allows it; other tests need a GPU.
ASKS_FOR_A_DEVICE = {"alone", "either", "gpu", "outcomes", "two_ranks_a_gpu"}


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    own = [item for item in items if FOLDER in item.path.parents]
    if own and len(own) == len(items):  # no other tests run in this process
        # SIGTERM, by which run.sh ends a step, ends pytest as Ctrl-C does: with a report of the tests so far.
        def stop(number: int, frame: FrameType | None) -> None:
            session.shouldstop = "SIGTERM"  # where Python ignores exceptions, such as in __del__, the interrupt is lost
            signal.default_int_handler(number, frame)

        signal.signal(signal.SIGTERM, stop)
    reason = why_not() if own else ""
    on_cpu = chosen_device().type == "cpu"
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif on_cpu and not ASKS_FOR_A_DEVICE.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="needs a GPU, this run is on the CPU"))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """The device, in a process group of one rank: over NCCL on a GPU, over gloo on the CPU."""
    device = chosen_device()
    make_deterministic(device)
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    with process_group(store, 0, 1, backend="nccl" if device.type == "cuda" else "gloo"):
        yield device


@pytest.fixture
def either() -> torch.device:
    """The device, for tests whose ranks are separate processes."""
    return chosen_device()


@pytest.fixture
def gpu(alone: torch.device) -> torch.device:
    """Like `alone`, for tests that make sense only on a GPU."""
    if alone.type != "cuda":
        pytest.skip("needs a GPU, this run is on the CPU")
    return alone
