"""Two ranks over gloo that share one GPU: the same numbers as torch's class, bit for bit."""

import pytest

from tests.gpu.cases import CASES
from tests.gpu.ranks import run_all_cases
from tests.harness import run_ranks


@pytest.fixture(scope="module")
def outcomes():
    """All cases in one pair of processes: starting one takes as long as many cases."""
    return run_ranks(run_all_cases, 2, "c10d", timeout=90, start_method="spawn")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.slow])
def test_same_as_torch(outcomes, name):
    if name not in outcomes[0]:
        pytest.skip("torch's class takes this on a GPU only")
    errors = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(outcomes) if of_rank[name] is not None]
    assert not errors, "\n".join(errors)


def test_both_ranks_ran_the_same_cases(outcomes):
    assert len(outcomes) == 2 and outcomes[0].keys() == outcomes[1].keys()
    assert len(outcomes[0]) > len(CASES) // 2
