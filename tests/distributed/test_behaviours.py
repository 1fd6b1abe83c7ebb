"""The class under test passes every named check, alone and at other world sizes where the check allows it."""

import pytest

from tests.behaviours import BEHAVIOURS
from tests.harness import run_ranks


def _one(rank: int, check: object, ddp_class: type) -> None:
    check(ddp_class, rank)  # type: ignore[operator]


def _params() -> list:
    return [
        pytest.param(b, id=b.name, marks=[pytest.mark.beyond_torch(b.beyond_torch)] if b.beyond_torch else [])
        for b in BEHAVIOURS.values()
    ]


@pytest.mark.parametrize("behaviour", _params())
def test_behaviour(behaviour, ddp_class):
    run_ranks(_one, 2, behaviour.check, ddp_class)
