"""What torch's class raises, ours raises too: the same type or one derived from it, in all cases but a few."""

import pytest
import torch.distributed as dist

from tests.fault.test_bad_input import BAD
from tests.harness import run_outcomes
from tests.parity.compare import TorchDDP
from tests.parity.misuse import CASES

# Those whose words are compared there: (what is called, the number of ranks).
ALL = {
    **{name: (case, 2) for name, case in CASES.items()},
    **{name: (bad.build, bad.world_size) for name, bad in BAD.items() if not bad.beyond_torch},
}
CRASH = "crash"  # not tried
# By case, what torch's class raises and what ours does; None: nothing. Each is in docs/migration.md.
DIFFERENCES = {
    "a_cap_that_is_negative": (None, "ValueError"),
    "a_cap_of_zero": (None, "ValueError"),
    "registers_another_name_for_the_bucket": ("KeyError", None),
    "registers_a_hook_without_arguments": ("KeyError", "TypeError"),
    "registers_right_annotations_as_text": ("ValueError", None),
    "registers_a_partial": ("AttributeError", None),
    "registers_bf16_on_the_cpu": ("TypeError", None),
    "a_hook_returns_nothing": (CRASH, "RuntimeError"),
    "a_hook_returns_a_shorter_tensor": (None, "RuntimeError"),
    "a_hook_returns_a_longer_tensor": (None, "RuntimeError"),
}


def raised_by(name, cls):
    """On each rank the names of the exception's type and those it is derived from; [None] if none was raised."""

    case, world_size = ALL[name]

    def work(rank):
        dist.barrier()  # a rank that is done leaves; the others must have connected by then
        try:
            case(cls, rank)
        except BaseException as error:
            return [base.__name__ for base in type(error).__mro__ if base is not object]
        return [None]

    outcomes = run_outcomes(work, world_size, group_timeout_s=10.0)
    return [outcome.value or [outcome.error] for outcome in outcomes]


@pytest.mark.beyond_torch("compares both")
@pytest.mark.parametrize("name", ALL)
def test_ours_raises_what_torchs_does(name, ddp_class):
    expected = DIFFERENCES.get(name)
    theirs = [[CRASH]] * 2 if expected and expected[0] == CRASH else raised_by(name, TorchDDP)
    ours = raised_by(name, ddp_class)
    for their, our in zip(theirs, ours, strict=True):
        if expected:
            assert (their[0], our[0]) == expected
        else:
            assert their[0] in our, (their, our)
