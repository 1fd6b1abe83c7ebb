"""Announcements are logged once per job, whatever launched its ranks, and only if they took effect."""

import sys

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import torchddp
from tests import framework
from tests.harness import gathered, logged, on_ranks
from tests.programs import CLAIM, clean_environment, run_together


def count(messages, words=CLAIM):
    return sum(words in message for message in messages)


def net():
    return nn.Linear(2, 2)


@on_ranks(1, 2, 4)
def test_once_per_job_by_rank_0_of_the_first_model(rank, world_size):
    said = logged()
    torchddp.install()
    before = count(said)
    for _ in range(2):
        framework.wrap(net())
    assert gathered((before, count(said))) == [(0, int(rank == 0)) for rank in range(world_size)]


@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[1, 2]]], ids=["two groups", "rank 0 has no model"])
@on_ranks(4)
def test_models_of_some_ranks_are_one_job(rank, members):
    said = logged()
    torchddp.install()
    for ranks in members:
        group = dist.new_group(ranks)
        if rank in ranks:
            framework.wrap(net(), process_group=group)
    counts = gathered(count(said))
    assert sum(counts) == 1 == sum(counts[ranks[0]] for ranks in members)


@on_ranks(2)
def test_a_derived_class_is_announced_with_its_first_model(rank):
    said = logged()
    with torchddp.install():

        class Derived(TorchDDP):
            pass

        before = len(said)
        for _ in range(2):
            Derived(net())
        framework.wrap(net())
    (before, messages), (_, others) = gathered((before, said))
    assert before == 0 and len(messages) == 1 and others == []
    assert f"{CLAIM}, first for {__name__}." in messages[0] and "Derived, which is derived from it" in messages[0]


@on_ranks(2)
def test_a_class_that_keeps_torchs_reducer_is_not_announced_but_explained(rank):
    said = logged()
    torchddp.install()
    for _ in range(2):
        assert not isinstance(framework.DerivedBefore(net()), torchddp.DDP)
    early = count(said, "tests.framework.DerivedBefore was derived from torch's DistributedDataParallel before")
    with pytest.raises(RuntimeError):  # nor is a model that could not be constructed
        framework.wrap(nn.Identity())
    assert gathered((count(said), early)) == [(0, 1), (0, 0)]


@on_ranks(4)
def test_an_unavailable_transport_is_reported_once(rank, monkeypatch):
    monkeypatch.setenv("TORCHDDP_SHM_LIMIT_MB", "-1")
    said = logged()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    names = [torchddp.DDP(net(), process_group=group).reducer.transport.name for group in (None, pairs[rank // 2])]
    found = gathered((count(said, "transport 'shm' can't be used"), names))
    assert sum(count for count, _ in found) <= 2  # one for the world and one for a pair of ranks
    assert {name for _, names in found for name in names} == {"c10d"}


SPAWNED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel as D
import torchddp

def work(rank, file):
    torchddp.install()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    sys.stdout.write(type(D(torch.nn.Linear(2, 2))).__module__ + "\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    torchddp.install()
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_once_under_spawn_from_a_parent_that_called_install(tmp_path):
    (tmp_path / "program.py").write_text(SPAWNED)
    command = [sys.executable, "program.py", str(tmp_path / "store")]
    (done,) = run_together([command], [clean_environment()], 500, tmp_path)
    assert done.stdout.split() == ["torchddp.ddp.module"] * 2, done.stdout + done.stderr
    assert done.returncode == 0 and done.stderr.count(CLAIM) == 1, done.stderr
