"""Random programs give what torch's class gives; and a class with a fault is found out."""

import json
from dataclasses import replace

import pytest
import torch

from tests import mutants as common
from tests.fuzz import mutants, report
from tests.fuzz.__main__ import main
from tests.fuzz.batches import run_trials
from tests.fuzz.compare import Raised, Strictness, exceptions_differ, tensors_differ
from tests.fuzz.draw import draw
from tests.fuzz.program import Do, Part, Program, Train
from tests.fuzz.side import Side
from tests.harness import CLASS_ENV

SEED = 2026
TRIALS = 60
PIECES = 4  # that run side by side
ASKED = report.Asked(SEED, None, None)


def first_failure(programs, ddp_class, limit_s=60.0):
    """Ends with the first trial that fails."""
    return next((result for result in run_trials(programs, ddp_class, limit_s) if result.failed), None)


@pytest.mark.parametrize("piece", range(PIECES))
def test_random_programs_give_what_torch_gives(ddp_class, piece):
    programs = {trial: draw(SEED, trial) for trial in range(piece, TRIALS, PIECES)}
    failure = first_failure(programs, ddp_class)
    assert failure is None, report.failure(failure, ASKED)


KEEPING = ((Train(), Do("keep", "view")), (Do("zero", "model_none"), Train()), (Do("zero", "model_none"), Train()))
# What each is found out by, and in programs that let it show.
MUTANTS = {
    common.DoubleGrad: ("gradient", {}),
    common.SlightlyOff: ("gradient", {}),
    common.ForgetsOneParameter: ("parameter", {"seeds_differ": True}),
    common.NoBufferSync: ("gradient", {"parts": (Part("buffered"),), "options": {}}),
    mutants.ChangesKept: ("kept gradient", {"options": {"gradient_as_bucket_view": False}, "steps": KEEPING}),
    mutants.ZerosForNone: ("gradient", {}),
    mutants.OtherError: ("exception", {"comm_hook": "failing"}),
    mutants.DrawsNumbers: ("random state", {}),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found_within_few_programs(mutant):
    kind, changes = MUTANTS[mutant]
    changes = {"transport": "c10d", "comm_hook": "none", **changes}
    programs = {trial: replace(draw(SEED, trial, world_size=2), **changes) for trial in range(12)}
    failure = first_failure(programs, mutant)
    assert failure is not None, f"{mutant.__name__} got past {len(programs)} programs"
    assert failure.difference.kind == kind, report.failure(failure, ASKED)


SHORT = Program(
    key="short",
    world_size=2,
    transport="c10d",
    parts=(Part("dense", shape=(3, 4)), Part("buffered")),
    steps=((Train(), Do("step")), (Do("zero", "model_none"), Train(), Do("keep", "grad"))),
)


@pytest.mark.parametrize(("mutant", "word"), [(mutants.Dies, "exit code -6"), (mutants.Hangs, "not back after")])
def test_ranks_that_die_or_hang_fail_their_trial_alone(mutant, word):
    programs = {7: replace(SHORT, steps=()), 8: SHORT, 9: replace(SHORT, steps=())}
    results = {result.trial: result for result in run_trials(programs, mutant, limit_s=6.0)}
    assert [results[trial].failed for trial in (7, 8, 9)] == [False, True, False]
    difference = results[8].difference
    assert difference.kind == "end" and word in difference.got
    assert (difference.step, difference.op) == (0, "Train()")


def test_a_failure_tells_how_to_repeat_it_and_the_command_does(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv(CLASS_ENV, "tests.fuzz.mutants.DrawsNumbers")
    arguments = ["--world-size", "1", "--seed", "5"]
    assert main([*arguments, "--trials", "2", "--json", str(tmp_path / "all.json")]) == 1
    shown = capfd.readouterr()
    assert shown.out == "2 trials, 2 failed (seed 5)\n"
    command = "python -m tests.fuzz --seed 5 --trial 1 --world-size 1"
    assert command in shown.err
    assert main(command.split()[3:]) == 1
    again = capfd.readouterr()
    assert again.out == "1 trials, 1 failed (seed 5)\n"
    told = json.loads((tmp_path / "all.json").read_text())
    assert [d["kind"] for d in told["differences"]] == ["random state"] * 2
    assert all(d["program"] in shown.err for d in told["differences"])
    assert told["differences"][1]["program"] in again.err


def test_status_is_zero_where_nothing_differs(capfd, monkeypatch):
    monkeypatch.setenv(CLASS_ENV, "torch.nn.parallel.DistributedDataParallel")
    assert main(["--world-size", "1", "--seed", "5", "--trials", "3"]) == 0
    assert capfd.readouterr().out.startswith("3 trials, 0 failed (seed 5)")


def test_programs_depend_on_seed_and_trial_alone():
    assert draw(3, 4) == draw(3, 4) and repr(draw(3, 4)) == repr(draw(3, 4))
    assert len({draw(3, trial).text() for trial in range(50)}) == 50
    assert draw(3, 4) != replace(draw(4, 4), key="3:4")
    for name, value in (("world_size", 2), ("transport", "c10d")):
        for trial in range(30):
            told = draw(3, trial, **{"world_size": 2, name: value})
            assert replace(told, world_size=0, transport="") == replace(draw(3, trial), world_size=0, transport="")


def test_every_operation_that_is_drawn_exists():
    ops = [op for trial in range(2000) for step in draw(1, trial).steps for op in step]
    names = {f"train_{op.how}" if isinstance(op, Train) else f"{op.what}_{op.how}".rstrip("_") for op in ops}
    assert all(hasattr(Side, name) for name in names)


@pytest.mark.parametrize(
    ("want", "got", "differ"),
    [
        (None, None, False),
        (None, torch.zeros(2), True),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), True),
        (torch.zeros(2, 1), torch.zeros(2), True),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), True),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), True),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0]), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 1e-6]), True),
        (torch.tensor([1j]), torch.tensor([2j]), True),
        (torch.zeros(3), torch.zeros(3).to_sparse(), True),
    ],
)
def test_tensors_differ(want, got, differ):
    assert (tensors_differ(want, got, Strictness()) is not None) is differ


def test_tolerance_is_relative_to_the_largest_element():
    want, near = torch.tensor([100.0, 0.0]), torch.tensor([100.0, 0.5])
    assert tensors_differ(want, near, Strictness(tolerance=1e-2)) is None
    assert tensors_differ(want, near, Strictness(tolerance=1e-3)) is not None
    assert tensors_differ(want, torch.tensor([100.0, float("inf")]), Strictness(tolerance=1e-2)) is not None


def test_who_catches_torchs_exception_must_catch_ours():
    runtime, transport = Raised(("RuntimeError",), "", ""), Raised(("TransportError", "RuntimeError"), "", "")
    assert not exceptions_differ(None, None) and not exceptions_differ(runtime, transport)
    assert (
        exceptions_differ(transport, runtime) and exceptions_differ(None, runtime) and exceptions_differ(runtime, None)
    )
