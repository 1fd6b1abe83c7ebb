"""torch's own analyzer reads a hang report's Flight Recorder files, and names the ranks that torchddp names."""

import json
import pickle
import stat

import pytest

from tests.fault import hanging_programs
from tests.fault.hanging_programs import KINDS, draw
from tests.fault.test_hang_reports import (
    CASES,
    SLOW_CASES,
    entered_another_collective,
    one_report,  # noqa: F401  # applies here too
    run_case,
)
from tests.programs import python
from tests.unit.test_hang_diagnosis import call
from torchddp.diagnose.diagnosis import diagnose
from torchddp.diagnose.flight_recorder import FOLDER_ENV, write_traces
from torchddp.diagnose.rank_state import RankState

slow = pytest.mark.slow
pytestmark = pytest.mark.beyond_torch("torch's class writes no hang reports")


def named_by_torch(folder):
    """The ranks that torchfrtrace misses, or else blames, where most ranks wait; and its text."""
    done = python("-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-o", str(folder / "found"))
    with open(folder / "found", "rb") as file:
        _, found = pickle.load(file)
    failed = [each for each in found.collectives if each.missing_ranks or each.mismatch_collectives]
    waiting = [len(each.expected_ranks - (each.missing_ranks or set())) for each in failed]
    named = [each.missing_ranks or set(each.mismatch_collectives) for each in failed]
    return set().union(
        *(ranks for ranks, number in zip(named, waiting, strict=True) if number == max(waiting))
    ), done.stderr


def named_by_torchddp(folder):
    (report,) = folder.glob("torchddp-hang-*.json")
    return {culprit["rank"] for culprit in json.loads(report.read_text())["culprits"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "traces"))
    return tmp_path / "traces"


def hangs(kind, world_size, culprit):
    """Whether ranks hang in it, and torchfrtrace has a name for what the culprit does if it is half of them."""
    if kind == "new group":  # of ranks 0 and 1; it returns at once on others
        return world_size > 2 and culprit < 2
    return kind != "other group" or world_size > 2


CALLS = {
    f"{kind}, rank {culprit} of {world_size}": (kind, world_size, culprit)
    for world_size in (2, 3, 4)
    for culprit in (0, world_size - 1)
    for kind in KINDS
    if hangs(kind, world_size, culprit)
}
FAST = ("other function, rank 0 of 3", "missing, rank 1 of 2", "other group, rank 2 of 3", "receives, rank 3 of 4")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case in FAST else slow) for case in CALLS])
def test_calls(case, folder, tmp_path):
    program = draw(list(CALLS).index(case), *CALLS[case])
    reports, _ = hanging_programs.run(program, tmp_path)
    (traces,) = folder.iterdir()
    assert reports[0].endswith(f"\n  for torchfrtrace: {traces}")
    files = sorted(traces.rglob("rank_*"), key=lambda file: file.name)
    assert [file.name for file in files] == [f"rank_{rank}" for rank in range(program.world_size)]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    found, text = named_by_torch(traces)
    expected = named_by_torchddp(tmp_path)
    if len(expected) == program.world_size == 2:  # no majority: torchfrtrace blames one of them
        assert found and found <= expected, text
    else:
        assert found == expected, f"{program.source}\n{reports}\n{text}"


# Not with two ranks, if one hangs in a call: each group then misses the other rank.
STEPS = [case for case in [*CASES, *SLOW_CASES] if case[0] is not entered_another_collective or case[2] > 2]


@pytest.mark.parametrize("case", [STEPS[0], *(pytest.param(case, marks=slow) for case in STEPS[1:])])
def test_steps(case, folder, tmp_path):
    run_case(*case, tmp_path)
    (traces,) = folder.iterdir()
    found, text = named_by_torch(traces)
    assert found == named_by_torchddp(tmp_path), text
    assert "collective: gloo:all_reduce of bucket " in text and "sequence number: 4" in text


STATES = [
    ([RankState(0, calls=[call("recv", 8, peer=1)]), RankState(1)], {1}),
    ([RankState(0, calls=[call("recv", 8)]), RankState(1, calls=[call("barrier", 9)])], {0}),  # from any rank
    ([RankState(0), RankState(1), RankState(2, calls=[call("send_object_list", 8, ranks=[1, 2], peer=1)])], {1}),
    ([RankState(0, calls=[call("monitored_barrier", 8)]), RankState(1, calls=[call("new_group", 9)])], {1}),
]


@pytest.mark.parametrize(("states", "missing"), STATES, ids=["recv", "recv from any", "send in a group", "new_group"])
def test_states(states, missing, folder):
    assert named_by_torch(write_traces(states, diagnose(states)))[0] == missing


def test_a_folder_that_cannot_be_written(folder):
    folder.write_text("a file")
    assert write_traces(STATES[0][0], diagnose(STATES[0][0])) is None
