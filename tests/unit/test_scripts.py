"""The scripts behind `make lint`, `make conformance` and `.ci/run` find what they are there to find."""

import ast
import json
from pathlib import Path
from types import ModuleType

import pytest

from scripts.check_conformance import WORLD_SIZES, expected_tests, read_outcome
from scripts.check_stubs import built_names, compare, stub_names
from scripts.count_tests import count

STUB = """
import torch
version: str
class Reducer:
    capacity: int
    def __init__(self) -> None: ...
    def _rebuild(self) -> bool: ...
    class State: ...
def add(x: torch.Tensor) -> torch.Tensor: ...
"""


def built_module() -> ModuleType:
    """A module as the stub above describes it."""
    module = ModuleType("_C")
    state = type("State", (), {"__qualname__": "Reducer.State"})
    members = {"capacity": 1, "__init__": lambda self: None, "_rebuild": lambda self: True, "State": state}
    module.Reducer = type("Reducer", (), members)
    module.version = "1"
    module.add = lambda x: x
    return module


def problems(module: ModuleType) -> list[str]:
    return compare(stub_names(ast.parse(STUB).body), built_names(module))


def test_stub_check_sees_both_directions_and_members() -> None:
    module = built_module()
    assert problems(module) == []
    del module.add, module.Reducer._rebuild
    module.extra = 1
    module.Reducer.State.more = 2
    assert problems(module) == [
        "in the stub, not in the extension: Reducer._rebuild",
        "in the stub, not in the extension: add",
        "in the extension, not in the stub: Reducer.State.more",
        "in the extension, not in the stub: extra",
    ]


def test_conformance_outcome(tmp_path: Path) -> None:
    path, statuses = tmp_path / "results.json", {"a": "pass", "b": "fail", "d": "pass"}
    path.write_text(json.dumps({"results": {name: {"status": status} for name, status in statuses.items()}}))
    outcome = read_outcome(path, expected=frozenset({"a", "b", "gone"}))
    assert outcome.missed == ["b", "gone"]
    assert outcome.passed == {"a", "d"} and outcome.reasons["b"].startswith("fail")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_conformance_expects_what_torch_passes(world_size: int) -> None:
    expected = expected_tests(world_size)
    assert len(expected) > 90 and all(name.startswith("WheelDistTest.test_") for name in expected)


def test_count_of_a_junit_report(tmp_path: Path) -> None:
    report = tmp_path / "pytest.xml"
    report.write_text('<testsuites><testsuite tests="10" failures="2" errors="1" skipped="3"/></testsuites>')
    assert count(str(report)) == (4, 3)
