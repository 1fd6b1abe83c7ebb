"""Ranks die, and the others go on without them, as docs/fault_tolerance.md shows."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.harness import gathered, on_ranks, over_both, run_outcomes, run_ranks
from tests.models import Mlp, batch, loss_of, seeded
from tests.pages import blocks_of

STEPS = 30
(PROGRAM,) = [code for code in blocks_of("fault_tolerance.md", "Another process group") if "survivors" in code]


class Training:
    """What the page's program needs; ``dies``: the step in which this rank does."""

    def __init__(self, group, dies=-1, **options):
        self.model = torchddp.DistributedDataParallel(
            seeded(Mlp).float(), process_group=group, bucket_cap_mb=0.001, timeout=30, **options
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.dies, self.took_s, self.state_at = dies, [], {}

    def train(self, step):
        begun_s = time.monotonic()
        group = self.model.process_group
        self.state_at[step] = [{k: v.clone() for k, v in self.model.module.state_dict().items()}, group.size()]
        self.optimizer.zero_grad()
        loss = loss_of(self.model(batch(group.rank(), step, dtype=torch.float32)))
        if step == self.dies:
            self.model.module.first.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        self.optimizer.step()
        self.took_s.append((step, time.monotonic() - begun_s))

    def run(self):
        names = {"train": self.train, "model": self.model, "optimizer": self.optimizer}
        exec(compile(PROGRAM, "program.py", "exec"), {**names, "dist": dist, "torchddp": torchddp, "torch": torch})
        return {name: value.tolist() for name, value in self.model.module.state_dict().items()}


def survive(rank, dying, transport):
    begun_s = time.monotonic()
    training = Training(None, dying.get(rank, -1), transport=transport)
    result = training.run()
    return result, len(training.took_s), time.monotonic() - begun_s


def never_failed(rank, dying, world_size, transport):
    """The same steps with the ranks that are left in each, in groups that exist from the beginning."""
    ends = [*sorted(dying.values()), STEPS]
    gone = []
    groups = [list(range(world_size))]
    for dead in sorted(dying, key=dying.__getitem__):
        gone.append(dead)
        groups.append([r for r in range(world_size) if r not in gone])
    made = [dist.new_group(ranks) for ranks in groups]
    training = Training(made[0], transport=transport)
    for index, end in enumerate(ends):
        if rank not in groups[index]:
            return None
        if index:
            training.model.update_process_group(made[index])
        for step in range(ends[index - 1] if index else 0, end):
            training.train(step)
    return {name: value.tolist() for name, value in training.model.module.state_dict().items()}


@over_both
@pytest.mark.parametrize(
    ("world_size", "dying"),
    [(2, {1: 7}), (3, {1: 7}), pytest.param(4, {1: 7, 3: 13}, marks=pytest.mark.slow), (4, {2: 0, 3: 29})],
)
def test_survivors_go_on_as_if_they_had_been_alone(world_size, dying, transport):
    """Bit for bit as in a run in which the dead ranks left politely; no step is lost."""
    left = [rank for rank in range(world_size) if rank not in dying]
    outcomes = run_outcomes(survive, world_size, dying, transport, needed_ranks=left)
    wanted = run_ranks(never_failed, world_size, dying, world_size, transport)
    for rank in left:
        assert outcomes[rank].ok, outcomes[rank].error
        weights, done, _ = outcomes[rank].value
        assert weights == wanted[rank]
        assert done == STEPS
    for rank in dying:
        assert outcomes[rank].exit_code in (-signal.SIGKILL, None)


def twice(rank):
    """Rank 2 dies; 3, 4 and 5 join the survivors; and 4 dies, which its neighbors in gloo's ring notice."""
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3, 4, 5])]
    alone = dist.new_group([rank], use_local_synchronization=True)
    model = torchddp.DistributedDataParallel(
        seeded(Mlp).float(), process_group=groups[0] if rank < 3 else alone, transport="c10d", timeout=30
    )
    for number, dead in enumerate((2, 4)):
        if rank > 2 and number == 0:
            continue
        if number == 1:
            model.update_process_group(groups[1])
        with pytest.raises(torchddp.TransportError):
            for step in range(6):
                loss = loss_of(model(batch(rank, step, dtype=torch.float32)))
                if step == 4 and rank == dead:
                    model.module.first.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
                loss.backward()
        begun_s = time.monotonic()
        left = torchddp.survivors(model.process_group)
        assert time.monotonic() - begun_s < 9.0  # not after the limit
    return left


def test_ranks_that_have_survived_before_go_on_with_others():
    outcomes = run_outcomes(twice, 6, needed_ranks=[0, 1, 3, 5])
    assert [outcomes[rank].value for rank in (0, 1, 3, 5)] == [[0, 1, 3, 5]] * 4, outcomes


@on_ranks(3)
def test_all_alive_and_a_group_of_some(rank):
    assert torchddp.survivors() == [0, 1, 2]
    pair = dist.new_group([0, 2])
    if rank != 1:
        assert torchddp.survivors(pair) == [0, 2]


def in_other_groups(rank):
    for ranks in ([0, 1], [2, 3], [0, 2, 3], [3]):  # rank 3 is in three groups, rank 1 in one
        if rank in ranks:
            dist.new_group(ranks, use_local_synchronization=True)
    model = torchddp.DistributedDataParallel(seeded(Mlp).float(), timeout=30)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(torchddp.TransportError):
        loss_of(model(batch(rank, dtype=torch.float32))).backward()
    ranks = torchddp.survivors()
    return dist.new_group(ranks, timeout=timedelta(seconds=20), use_local_synchronization=True).size()


def test_survivors_that_were_in_unequal_numbers_of_groups():
    outcomes = run_outcomes(in_other_groups, 4, needed_ranks=[0, 1, 3])
    assert [outcomes[rank].value for rank in (0, 1, 3)] == [3, 3, 3]


def late(rank):
    torchddp.DistributedDataParallel(torch.nn.Linear(1, 1))
    group = dist.new_group([1, 2, 3])
    if rank == 2:
        time.sleep(2.0)
        with pytest.raises(torchddp.TransportError, match=r"rank 2 called survivors\(\) later .*\(ranks 1, 3\)"):
            torchddp.survivors(group)
    elif rank > 0:
        assert torchddp.survivors(group, within_s=timedelta(seconds=0.5)) == [1, 3]
    gathered(rank)


def test_a_rank_that_comes_too_late_is_told():
    run_ranks(late, 4)


@on_ranks(1)
def test_wrong_arguments(rank):
    with pytest.raises(TypeError, match="within_s"):
        torchddp.survivors(within_s="1")
    with pytest.raises(ValueError, match="time limit"):
        torchddp.survivors(within_s=None)
    assert torchddp.survivors() == [0]
