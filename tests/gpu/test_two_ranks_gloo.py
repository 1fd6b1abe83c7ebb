"""Two ranks over gloo that share one GPU: bitwise equal to torch's class."""

import pytest

from tests.gpu.cases import CASES
from tests.gpu.ranks import assert_same_as_torch, run_all_cases
from tests.harness import run_ranks


@pytest.fixture(scope="module")
def outcomes():
    """Run all cases in one pair of processes, because starting a process takes as long as many cases."""
    found = run_ranks(run_all_cases, 2, "c10d", timeout=90, start_method="spawn")
    assert found[0].keys() == found[1].keys() and len(found[0]) > len(CASES) // 2
    return found


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.slow])
def test_same_as_torch(outcomes, name):
    if name not in outcomes[0]:
        pytest.skip("torch's class takes this on a GPU only")
    assert_same_as_torch(outcomes, name)
