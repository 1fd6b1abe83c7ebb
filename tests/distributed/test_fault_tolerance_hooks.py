"""Compressed gradients under a manager: PowerSGD, which sends nothing but sums."""

import pytest
import torch
from torch import nn

import torchddp
from tests.harness import gathered, on_ranks
from tests.managers import FakeManager
from tests.models import same_on_all_ranks
from torchddp.comm_hooks import BF16, PowerSGD
from torchddp.fault_tolerance.data_parallel import DistributedDataParallel
from torchddp.fault_tolerance.replica_state import load_state_dict, state_dict

CAP_MB = 0.004  # several buckets


def net(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 8))


def step_on(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    model.zero_grad()
    model(torch.randn(16, 40, generator=generator)).square().mean().backward()


def step_under(manager, model, rank, step):
    """Whether it may be committed."""
    manager.start_quorum()
    step_on(model, rank, step)
    return manager.should_commit()


def grads_of(model):
    return [p.grad.clone() for p in model.parameters()]


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"start_step": 2}, {"warm_start": False}], ids=str)
@on_ranks(2, 3)
def test_power_sgd_does_what_it_does_between_fixed_ranks(rank, options):
    manager = FakeManager()
    model = DistributedDataParallel(manager, net(), bucket_cap_mb=CAP_MB, comm_hook=PowerSGD(2, **options))
    # The same buckets: the other rebuilds its own.
    other = torchddp.DistributedDataParallel(net(), transport="c10d", comm_hook=PowerSGD(2, **options))
    for step in range(6):
        assert step_under(manager, model, rank, step)
        step_on(other, rank, step)
        assert same_on_all_ranks(grads_of(model))
        assert_close(grads_of(model), grads_of(other))
    whole = sum(p.numel() for p in model.parameters())
    assert 0 < sum(numel for numel, _ in manager.calls) < whole / 2
    assert model.traffic()["hook"].payload_bytes == 4 * whole


@on_ranks(2)
def test_what_a_failed_step_held_back_is_forgotten(rank):
    manager, hook = FakeManager(), PowerSGD(2)
    model = DistributedDataParallel(manager, net(), bucket_cap_mb=CAP_MB, comm_hook=hook)
    for step in range(3):
        manager.start_quorum()
        manager.fails_at = 3 if step == 2 else None
        step_on(model, rank, step)
        assert manager.should_commit() == (step != 2)
    manager.start_quorum()
    manager.fails_at = None
    step_on(model, rank, 3)
    assert manager.should_commit()
    assert same_on_all_ranks(grads_of(model))
    assert all(torch.isfinite(grad).all() for grad in grads_of(model))
    again, fresh = FakeManager(), PowerSGD(2)
    alone = DistributedDataParallel(again, net(), bucket_cap_mb=CAP_MB, comm_hook=fresh)
    again.start_quorum()
    step_on(alone, rank, 3)
    assert_close(grads_of(model), grads_of(alone))  # as a first step: neither residuals nor Q of before


@on_ranks(2)
def test_a_replica_that_heals_goes_on_with_the_factors_of_the_others(rank):
    """It takes part in no sum of the step in which it heals, and gets the others' average all the same."""
    manager, hook = FakeManager(), PowerSGD(2)
    model = DistributedDataParallel(manager, net(), bucket_cap_mb=CAP_MB, comm_hook=hook)
    for step in range(3):
        assert step_under(manager, model, rank, step)
    if rank == 1:  # it was restarted
        hook = PowerSGD(2)
        model = DistributedDataParallel(manager, net(), bucket_cap_mb=CAP_MB, comm_hook=hook)
    states = gathered(state_dict(model))
    manager.start_quorum()
    manager.heals = rank == 1
    step_on(model, rank, 3)
    assert same_on_all_ranks(grads_of(model))
    assert manager.should_commit()
    if rank == 1:
        load_state_dict(model, states[0])
        assert not hook.state_dict()["residual"]
        assert set(hook.carried_state()["factors"]) == {"0.weight", "2.weight", "4.weight"}
    manager.heals = False
    for step in (4, 5):
        assert step_under(manager, model, rank, step)
        assert same_on_all_ranks(grads_of(model))
    factors = [hook.carried_state()["factors"][name] for name in ("0.weight", "2.weight", "4.weight")]
    assert same_on_all_ranks(factors)


@on_ranks(1)
def test_replicas_with_other_hooks_are_told(rank):
    with_hook = DistributedDataParallel(FakeManager(), net(), comm_hook=PowerSGD(2))
    without = DistributedDataParallel(FakeManager(), net())
    with pytest.raises(RuntimeError, match="here it is none, on the healthy replica .'PowerSGD'"):
        load_state_dict(without, state_dict(with_hook))
    with pytest.raises(RuntimeError, match="BF16 sends messages between fixed ranks"):
        without.register_comm_hook(None, BF16())
