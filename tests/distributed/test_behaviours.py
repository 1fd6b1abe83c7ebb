"""The class under test passes every named check."""

import pytest

from tests.behaviours import BEHAVIOURS
from tests.harness import on_ranks


def _params() -> list:
    return [
        pytest.param(b, id=b.name, marks=[pytest.mark.beyond_torch(b.beyond_torch)] if b.beyond_torch else [])
        for b in BEHAVIOURS.values()
    ]


@pytest.mark.parametrize("behaviour", _params())
@on_ranks(2)
def test_behaviour(rank, behaviour, ddp_class):
    behaviour.check(ddp_class, rank)
