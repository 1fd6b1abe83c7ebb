"""Communication hooks follow a model to another process group, with what they hold back."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from tests.comm_hooks import Given, assert_near, assert_nothing_gets_lost, given, held_back, hooked, live_on, step_of
from tests.harness import gathered, on_ranks
from torchddp import DistributedDataParallel
from torchddp.comm_hooks import BF16, CastAround, Int4, Int8, PerParameter, PowerSGD, Sign, TopK

pytestmark = pytest.mark.beyond_torch("hooks of its own")

HOOKS = {
    "int8": Int8,
    "bf16": lambda: BF16(error_feedback=True),
    "topk": lambda: TopK(0.1),
    "powersgd": lambda: PowerSGD(2),
    "rules": lambda: PerParameter(Int4(), [("narrow", PowerSGD(3)), ("bias", None), ("long", Sign())]),
}
MEMBERS = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 1], [1], [0, 2, 1]]


def alone(rank):
    return dist.new_group([rank], use_local_synchronization=True)


@pytest.mark.rest_is_thorough("aabb")
@pytest.mark.parametrize("hosts", [None, "aabb"])
@on_ranks(4, timeout=60)
def test_nothing_that_was_held_back_gets_lost(rank, hosts):
    """In each of several groups."""
    live_on(hosts, rank)
    for make in HOOKS.values():
        groups = [dist.new_group(ranks) for ranks in MEMBERS]
        hook = make()
        model = hooked(hook, process_group=groups[0] if rank < 2 else alone(rank))
        for number, (ranks, group) in enumerate(zip(MEMBERS, groups, strict=True)):
            if rank in ranks:
                own = held_back(hook)
                model._update_process_group(group)
                assert_near(held_back(hook), own, 1e-6, f"rank {rank} in {ranks}:")
                assert_nothing_gets_lost(model, hook, range(100 * number, 100 * number + 2), 2e-5, ranks)


@on_ranks(3)
def test_power_sgd_keeps_its_warm_start(rank):
    """Who joins, here as rank 0, gets the factors of who has made most steps, and its count."""
    hook = CastAround(PowerSGD(2))
    model = hooked(hook, process_group=dist.new_group([1, 2], use_local_synchronization=True) if rank else alone(0))
    for step in range(3 if rank else 1):
        step_of(model, given(rank, step))
    wanted = gathered(hook.state_dict()["inner"]["factors"])[1]
    model._update_process_group(dist.group.WORLD)
    state = hook.state_dict()
    assert state["step"] == 3
    mine = state["inner"]["factors"]
    assert mine.keys() == wanted.keys() == {"embed", "wide", "narrow"}
    for name, factor in mine.items():
        assert torch.equal(factor, wanted[name]), name
    for step in range(3):
        step_of(model, given(rank, step))  # the same on all ranks


@pytest.mark.parametrize("kind", ["int8", "powersgd", "rules"])
@on_ranks(3, needed_ranks=[0, 2], timeout=30, straggler_s=20)
def test_hooks_go_on_after_a_death(rank, kind):
    """In the midst of a step, whose buckets some ranks may have reduced."""
    hook = HOOKS[kind]()
    model = hooked(hook)
    for step in range(3):
        step_of(model, given(rank, step))
    if rank == 1:
        model.module.wide.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=rf"on rank {rank}, step 4"):
        step_of(model, given(rank, 3))
    model._update_process_group(dist.new_group([0, 2], use_local_synchronization=True))
    assert_nothing_gets_lost(model, hook, range(4, 7), 2e-5, [0, 2])
    assert hook.state_dict()["step"] == 7


@on_ranks(2)
def test_hooks_of_torch_that_would_send_to_the_old_ranks_are_refused(rank):
    def hooked_by_torch(state, hook):
        model = DistributedDataParallel(Given())
        model.register_comm_hook(state, hook)
        return model

    def pair():
        return dist.new_group([0, 1])

    def refused(words, state, hook):
        model = hooked_by_torch(state, hook)
        with pytest.raises(RuntimeError, match=words):
            model._update_process_group(pair())
        step_of(model, given(rank, 0))

    whole = dist.group.WORLD
    refused("its state is the old one", whole, default_hooks.allreduce_hook)
    refused("all ranks of the default group", None, default_hooks.allreduce_hook)
    state = torch_power_sgd.PowerSGDState(whole, matrix_approximation_rank=1, start_powerSGD_iter=2)
    refused("Set state.process_group", state, torch_power_sgd.powerSGD_hook)
    model = hooked_by_torch(state, torch_power_sgd.powerSGD_hook)
    state.process_group = pair()
    model._update_process_group(state.process_group)
    step_of(model, given(rank, 0))
    builtin = DistributedDataParallel(Given())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(RuntimeError, match="built-in communication hook of rank"):
        builtin._update_process_group(pair())
    builtin._update_process_group(whole)
