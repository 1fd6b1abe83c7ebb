"""torchrun's variables derived from srun's. tests/distributed/test_slurm.py tests them under srun."""

import os

import pytest

from torchddp.harness.srun import first_host, set_rank_variables, tasks_by_node, torchrun_variables

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_torchruns_variables_are_derived_in_srun_tasks_and_only_there() -> None:
    found = torchrun_variables(TASK)
    port = found.pop("MASTER_PORT")
    assert found == {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n08"}
    assert 20_000 <= int(port) < 30_000
    others = {**TASK, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert torchrun_variables(others)["MASTER_PORT"] == port  # tasks of one step have the same port
    assert torchrun_variables({**TASK, "SLURM_STEP_ID": "3"})["MASTER_PORT"] != port
    assert tasks_by_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_by_node("4") == [4] and tasks_by_node("") == []
    # A step of one task, in which torchrun starts the ranks, and a batch script.
    for changes in ({"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": ""}, {"SLURM_PROCID": ""}):
        assert torchrun_variables({**TASK, **changes}) == {}, changes
    assert torchrun_variables({}) == {}
    lists = ("vm", "a,b[1-2]", "node[08-11,20],login", "rack[1-2]n[3,4]", "n[7]-ib")
    assert [first_host(nodes) for nodes in lists] == ["vm", "a", "node08", "rack1n3", "n7-ib"]


def test_variables_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOLD:  # restored afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "7")
    set_rank_variables()
    assert "WORLD_SIZE" not in os.environ
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    set_rank_variables()
    assert (os.environ["RANK"], os.environ["MASTER_ADDR"]) == ("2", "10.0.0.1")
