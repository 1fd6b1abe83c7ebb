"""torch's own analyzer reads a hang report's Flight Recorder files, and names the ranks that torchddp names."""

import json
import stat

import pytest

from tests.fault import hanging_programs
from tests.fault.hanging_programs import KINDS, draw, named_by_torch, named_in
from tests.unit.test_hang_diagnosis import call
from torchddp.diagnose.diagnosis import diagnose
from torchddp.diagnose.flight_recorder import FOLDER_ENV, write_traces
from torchddp.diagnose.rank_state import RankState

pytestmark = pytest.mark.beyond_torch("torch's class writes no hang reports")


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
FAST = ("other function, rank 0 of 3", "missing, rank 1 of 2")
SLOW = {f"{kind}, rank 0 of 3" for kind in ("awaited", "compiled", "new group", "other group", "receives")}


def kind_of(case):
    return [] if case in FAST else pytest.mark.slow if case in SLOW else pytest.mark.thorough


@pytest.mark.parametrize("case", [pytest.param(case, marks=kind_of(case)) for case in CALLS])
def test_calls(case, folder, tmp_path):
    """One report names the position of every rank, whether it is in a call or not, and torch's analyzer agrees."""
    program = draw(list(CALLS).index(case), *CALLS[case])
    reports, places = hanging_programs.run(program, tmp_path)
    told = f"{program.source}\n{reports}\n{places}"
    assert len(reports) == 1 and all(line for _, line in places), told
    assert named_in(reports[0].partition("\n")[0]) == {
        rank: (name, f"program{program.seed}.py", line) for rank, (name, line) in enumerate(places)
    }, told
    (traces,) = folder.iterdir()
    assert reports[0].endswith(f"\n  for torchfrtrace: {traces}")
    files = sorted(traces.rglob("rank_*"), key=lambda file: file.name)
    assert [file.name for file in files] == [f"rank_{rank}" for rank in range(program.world_size)]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    found, text = named_by_torch(traces)
    (report,) = tmp_path.glob("torchddp-hang-*.json")
    expected = {culprit["rank"] for culprit in json.loads(report.read_text())["culprits"]}
    if len(expected) == program.world_size == 2:  # no majority: torchfrtrace blames one of them
        assert found and found <= expected, text
    else:
        assert found == expected, f"{told}\n{text}"


STATES = [
    ([RankState(0, calls=[call("recv", 8)]), RankState(1, calls=[call("barrier", 9)])], {0}),  # from any rank
    ([RankState(0), RankState(1), RankState(2, calls=[call("send_object_list", 8, ranks=[1, 2], peer=1)])], {1}),
    ([RankState(0, calls=[call("monitored_barrier", 8)]), RankState(1, calls=[call("new_group", 9)])], {1}),
]


@pytest.mark.parametrize(("states", "missing"), STATES, ids=["recv from any", "send in a group", "new_group"])
def test_states(states, missing, folder):
    assert named_by_torch(write_traces(states, diagnose(states)))[0] == missing


def test_a_folder_that_cannot_be_written(folder):
    folder.write_text("a file")
    assert write_traces(STATES[0][0], diagnose(STATES[0][0])) is None
