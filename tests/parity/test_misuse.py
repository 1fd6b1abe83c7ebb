"""Ours raises what torch's class raises, or a derived type, in all but a few cases."""

from functools import partial

import pytest
import torch

from tests.fault.test_bad_input import BAD
from tests.harness import errors_of, run_ranks
from tests.parity.compare import TorchDDP
from tests.parity.misuse import CASES

# Cases of test_bad_input.py, whose messages are compared there: (call, number of ranks).
ALL = {
    **{name: (case, 2) for name, case in CASES.items()},
    **{name: (bad.build, bad.world_size) for name, bad in BAD.items() if not bad.beyond_torch},
}
CRASH = "crash"  # not run
# By case, what torch's class raises and what ours raises (None: nothing). Each is in docs/migration.md.
DIFFERENCES = {
    "a_cap_that_is_negative": (None, "ValueError"),
    "a_cap_of_zero": (None, "ValueError"),
    "registers_another_name_for_the_bucket": ("KeyError", None),
    "registers_a_hook_without_arguments": ("KeyError", "TypeError"),
    "registers_right_annotations_as_text": ("ValueError", None),
    "registers_a_partial": ("AttributeError", None),
    "registers_bf16_on_the_cpu": (None if torch.version.cuda else "TypeError", None),
    "a_hook_returns_nothing": (CRASH, "RuntimeError"),
    "a_hook_returns_a_shorter_tensor": (None, "RuntimeError"),
    "a_hook_returns_a_longer_tensor": (None, "RuntimeError"),
}


PIECES = 4  # of those for two ranks


def raised_by(cls, names, world_size):
    """By name and rank: the MRO of the exception; [None] if none was raised."""

    def work(rank):
        return errors_of({name: partial(ALL[name][0], cls, rank) for name in names}, rank, world_size, timeout_s=10.0)

    ranks = run_ranks(work, world_size)
    return {name: [found[name][0] or [None] for found in ranks] for name in names}


@pytest.mark.beyond_torch("compares both")
@pytest.mark.parametrize(("world_size", "piece"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_ours_raises_what_torchs_does(ddp_class, world_size, piece):
    names = [name for name, (_, size) in ALL.items() if size == world_size][piece :: PIECES if world_size > 1 else 1]
    crashes = {name: [[CRASH]] * world_size for name in names if DIFFERENCES.get(name, (None,))[0] == CRASH}
    theirs = crashes | raised_by(TorchDDP, [name for name in names if name not in crashes], world_size)
    ours = raised_by(ddp_class, names, world_size)
    for name in names:
        for their, our in zip(theirs[name], ours[name], strict=True):
            told = f"{name}: torch's class {their}, ours {our}"
            if name in DIFFERENCES:
                assert (their[0], our[0]) == DIFFERENCES[name], told
            else:
                assert their[0] in our, told
