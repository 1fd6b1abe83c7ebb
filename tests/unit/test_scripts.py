"""The scripts behind `make lint` and `make conformance` detect the problems they check for."""

import ast
import json
from pathlib import Path
from types import ModuleType

from scripts.check_conformance import WORLD_SIZES, expected_tests, read_outcome
from scripts.check_stubs import built_names, compare, stub_names

STUB = """
import torch
version: str
class Reducer:
    def __init__(self) -> None: ...
    class State: ...
def add(x: torch.Tensor) -> torch.Tensor: ...
"""


def test_stub_check_covers_both_directions_and_members() -> None:
    module = ModuleType("_C")
    state = type("State", (), {"__qualname__": "Reducer.State"})
    module.Reducer = type("Reducer", (), {"__init__": lambda self: None, "State": state})
    module.version, module.add = "1", lambda x: x

    def problems() -> list[str]:
        return compare(stub_names(ast.parse(STUB).body), built_names(module))

    assert problems() == []
    del module.add
    module.extra = 1
    module.Reducer.State.more = 2
    assert problems() == [
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
    for world_size in WORLD_SIZES:
        wanted = expected_tests(world_size)
        assert len(wanted) > 90 and all(name.startswith("WheelDistTest.test_") for name in wanted)
