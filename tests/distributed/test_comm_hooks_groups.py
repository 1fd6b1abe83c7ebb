"""Communication hooks follow a model to another process group, with what they hold back."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from tests.comm_hooks import SHAPES, assert_near, given, hooked, live_on
from tests.harness import on_ranks, run_outcomes
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
STEPS = 4


def alone(rank):
    return dist.new_group([rank], use_local_synchronization=True)


def averages(ranks, step):
    return {name: sum(given(r, step)[name].double() for r in ranks) / len(ranks) for name in SHAPES}


def run_step(model, gradients):
    model.zero_grad()
    model(gradients).backward()
    return {name: p.grad.double() for name, p in model.module.named_parameters()}


def held_back(hook):
    """All that this rank keeps for later, by parameter, in units of the average."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def add(state):
        for kind in ("residual", "server_residual"):
            for name, value in state.get(kind, {}).items():
                total[name] += value
        for inner in [*state.get("hooks", ()), *([state["inner"]] if "inner" in state else [])]:
            add(inner)

    add(hook.state_dict())
    return total


def sum_over(group, tensors):
    sums = {name: value.clone() for name, value in tensors.items()}
    for name in sorted(sums):
        dist.all_reduce(sums[name], group=group)
    return sums


@pytest.mark.rest_is_thorough("aabb")
@pytest.mark.parametrize("hosts", [None, "aabb"])
@on_ranks(4, timeout=60)
def test_nothing_that_was_held_back_gets_lost(rank, hosts):
    """In each group: what comes out of its steps is what went in, with what was held back before and after."""

    def check(rank, make):
        groups = [dist.new_group(ranks) for ranks in MEMBERS]
        hook = make()
        model = hooked(hook, process_group=groups[0] if rank < 2 else alone(rank))
        step = 0
        for ranks, group in zip(MEMBERS, groups, strict=True):
            step += 100
            if rank not in ranks:
                continue
            own = held_back(hook)
            model._update_process_group(group)
            kept = held_back(hook)
            assert_near(kept, own, 1e-6, f"rank {rank} in {ranks}:")
            wanted = sum_over(group, kept)
            got = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
            for at in range(step, step + STEPS):
                for name, value in run_step(model, given(rank, at)).items():
                    got[name] += value
                for name, value in averages(ranks, at).items():
                    wanted[name] += value
            for name, value in sum_over(group, held_back(hook)).items():
                wanted[name] -= value
            assert_near(got, wanted, 2e-5, f"rank {rank} in {ranks}:")
        assert len({hook.state_dict()["step"]}) == 1

    live_on(hosts, rank)
    for make in HOOKS.values():
        check(rank, make)


@on_ranks(3)
def test_power_sgd_keeps_its_warm_start(rank):
    """Who joins, here as rank 0, gets the factors of who has made most steps, and its count."""
    hook = CastAround(PowerSGD(2)) if rank < 9 else None
    model = hooked(hook, process_group=dist.new_group([1, 2], use_local_synchronization=True) if rank else alone(0))
    factors = []
    for step in range(3 if rank else 1):
        run_step(model, given(rank, step))
    if rank == 1:
        factors = [hook.state_dict()["inner"]["factors"]]
    model._update_process_group(dist.group.WORLD)
    wanted = factors or [None]
    dist.broadcast_object_list(wanted, src=1)
    state = hook.state_dict()
    assert state["step"] == 3
    mine = state["inner"]["factors"]
    assert mine.keys() == wanted[0].keys() == {"embed", "wide", "narrow"}
    for name, factor in mine.items():
        assert torch.equal(factor, wanted[0][name]), name
    for step in range(3):
        # As near as two of 24 columns and more can come: the same on all ranks is what counts.
        grads = run_step(model, given(rank, step))
        sums = sum_over(dist.group.WORLD, grads)
        assert all(torch.allclose(sums[name], 3 * grads[name]) for name in grads)


@pytest.mark.parametrize("kind", ["int8", "powersgd", "rules"])
def test_hooks_go_on_after_a_death(kind):
    """In the midst of a step, whose buckets some ranks may have reduced."""

    def work(rank):
        hook = HOOKS[kind]()
        model = hooked(hook)
        for step in range(3):
            run_step(model, given(rank, step))
        if rank == 1:
            model.module.wide.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(RuntimeError, match=rf"on rank {rank}, step 4"):
            run_step(model, given(rank, 3))
        model._update_process_group(dist.new_group([0, 2], use_local_synchronization=True))
        group = model.process_group
        wanted = sum_over(group, held_back(hook))
        got = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for step in range(4, 7):
            for name, value in run_step(model, given(rank, step)).items():
                got[name] += value
            for name, value in averages([0, 2], step).items():
                wanted[name] += value
        for name, value in sum_over(group, held_back(hook)).items():
            wanted[name] -= value
        assert_near(got, wanted, 2e-5)
        return hook.state_dict()["step"]

    outcomes = run_outcomes(work, 3, needed_ranks=[0, 2], timeout=30, straggler_s=20)
    assert [outcomes[rank].error for rank in (0, 2)] == [None, None]
    assert outcomes[0].value == outcomes[2].value == 7


@on_ranks(2)
def test_hooks_of_torch_that_would_send_to_the_old_ranks_are_refused(rank):
    def refused(words, state, hook):
        model = hooked_by_torch(state, hook)
        with pytest.raises(RuntimeError, match=words):
            model._update_process_group(pair())
        run_step(model, given(dist.get_rank(), 0))

    def hooked_by_torch(state, hook):
        model = hooked(BF16())
        model = type(model)(model.module)
        model.register_comm_hook(state, hook)
        return model

    def pair():
        return dist.new_group([0, 1])

    whole = dist.group.WORLD
    refused("its state is the old one", whole, default_hooks.allreduce_hook)
    refused("all ranks of the default group", None, default_hooks.allreduce_hook)
    state = torch_power_sgd.PowerSGDState(whole, matrix_approximation_rank=1, start_powerSGD_iter=2)
    refused("Set state.process_group", state, torch_power_sgd.powerSGD_hook)
    model = hooked_by_torch(state, torch_power_sgd.powerSGD_hook)
    state.process_group = pair()
    model._update_process_group(state.process_group)
    run_step(model, given(rank, 0))
    builtin = type(model)(model.module)
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(RuntimeError, match="built-in communication hook of rank"):
        builtin._update_process_group(pair())
    builtin._update_process_group(whole)
