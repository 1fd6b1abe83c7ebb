"""Random programs give torch's results, and the fuzzer finds classes with a fault."""

from dataclasses import replace

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests import mutants
from tests.fuzz.draw import KEEP_VIEW, draw, trained
from tests.fuzz.program import Part, Program
from tests.fuzz.run import run_trials
from tests.shm_backend import BACKEND
from tests.whole_buckets import LargeInPlace, WholeBuckets

SEED = 2026
TRIALS = 60
PIECES = 4  # that run concurrently


def first_failure(programs, ddp_class, limit_s=240.0):
    """The first failed trial, or None."""
    return next((result for result in run_trials(programs, ddp_class, limit_s) if result.failed), None)


OWN_WAY = pytest.mark.beyond_torch("packs whole buckets in its own way")
RUNS = [(None, 0), (None, 1)]
RUNS += [pytest.param(None, piece, marks=pytest.mark.thorough) for piece in (2, 3)]
RUNS += [pytest.param(kind, 0, marks=[pytest.mark.slow, OWN_WAY]) for kind in (WholeBuckets, LargeInPlace)]


@pytest.mark.parametrize(("kind", "piece"), RUNS)
def test_random_programs_give_what_torch_gives(ddp_class, kind, piece):
    programs = {trial: draw(SEED, trial) for trial in range(piece, TRIALS, PIECES)}
    failure = first_failure(programs, kind or ddp_class)
    assert failure is None, failure.text()


@pytest.mark.slow
@pytest.mark.parametrize("cls", [TorchDDP, torchddp.DDP])
def test_random_programs_over_torchddp_shm(cls):
    programs = {trial: replace(draw(SEED, trial), backend=BACKEND) for trial in range(2, TRIALS, PIECES)}
    failure = first_failure(programs, cls)
    assert failure is None, failure.text()


KEEPING = ((trained(), KEEP_VIEW), ("ddp.zero_grad()", trained()), ("ddp.zero_grad()", trained()))
# The kind of difference that reveals each fault, and program settings that expose it.
MUTANTS = {
    mutants.SlightlyOff: ("gradient", {}),
    mutants.ChangesKept: ("kept gradient", {"options": {"gradient_as_bucket_view": False}, "steps": KEEPING}),
    mutants.ZerosForNone: ("gradient", {}),
    mutants.OtherError: ("exception", {"comm_hook": "failing"}),
    mutants.DrawsNumbers: ("random state", {}),
    mutants.NoBufferSync: ("gradient", {"parts": (Part("buffered"),), "options": {}}),
    mutants.IgnoresNoSync: ("gradient", {}),
    mutants.NoInitSync: ("parameter", {"seeds_differ": True}),
}


@pytest.mark.rest_is_thorough("ChangesKept", "DrawsNumbers")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found_within_few_programs(mutant):
    kind, changes = MUTANTS[mutant]
    changes = {"transport": "c10d", "comm_hook": "none", **changes}
    programs = {trial: replace(draw(SEED, trial, world_size=2), **changes) for trial in range(12)}
    failure = first_failure(programs, mutant)
    assert failure is not None, f"{mutant.__name__} got past {len(programs)} programs"
    assert failure.difference.kind == kind, failure.text()


SHORT = Program(
    key="short",
    world_size=2,
    transport="c10d",
    parts=(Part("dense", shape=(3, 4)), Part("buffered")),
    steps=((trained(), "optimizer.step()"), ("ddp.zero_grad()", trained())),
)


@pytest.mark.parametrize(("mutant", "word"), [(mutants.Dies, "exit code -6"), (mutants.Hangs, "not back after")])
def test_ranks_that_die_or_hang_fail_their_trial_alone(mutant, word):
    programs = {7: replace(SHORT, steps=()), 8: SHORT, 9: replace(SHORT, steps=())}
    results = {result.trial: result for result in run_trials(programs, mutant, limit_s=4.0)}
    assert [results[trial].failed for trial in (7, 8, 9)] == [False, True, False]
    difference = results[8].difference
    assert difference.kind == "end" and word in difference.got
    assert (difference.step, difference.op) == (0, trained())
