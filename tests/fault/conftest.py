"""Every test here limits the time until ranks detect a fault."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.may_rerun("ranks must notice a fault in time, on processors that may be busy"))
