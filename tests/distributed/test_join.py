"""join() with each of its options, alone and with other joinables, over shared memory and the process group."""

import re
from datetime import timedelta

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import on_ranks, stay
from tests.models import Mlp, batch, loss_of, seeded

TRANSPORTS = ["c10d", "shm"]


def wrappers(transport):
    """torchddp's class over a transport, and torch's."""
    return (
        lambda module: torchddp.DistributedDataParallel(module, transport=transport, bucket_cap_mb=0.001),
        lambda module: TorchDDP(module, bucket_cap_mb=0.001),
    )


def trained(wrap, rank, steps, **options):
    """Two models in one join; their parameters in the end."""
    models = [wrap(seeded(Mlp, seed)) for seed in (0, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with Join(models, **options):
        for step in range(steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model(batch(rank, step))).backward()
                optimizer.step()
    return [p.detach() for model in models for p in model.parameters()]


@pytest.mark.parametrize(("transport", "world_size"), [("c10d", 3), ("shm", 2), ("shm", 3)])
@on_ranks()
def test_several_joinables_and_who_is_divided_by(rank, transport):
    """Also where a rank has no input at all."""
    ours, theirs = wrappers(transport)
    for divide in (True, False):
        for steps in (1 + 2 * rank, 2 * rank):
            options = {"divide_by_initial_world_size": divide}
            mine = trained(ours, rank, steps, **options)
            for a, b in zip(mine, trained(theirs, rank, steps, **options), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(3)
def test_early_termination_is_of_all_ranks_at_once(rank, transport):
    ours, _ = wrappers(transport)
    with pytest.raises(RuntimeError, match="exhausted"):
        trained(ours, rank, 2 + rank, throw_on_early_termination=True)
    # The group can be used again.
    model = ours(seeded(Mlp))
    loss_of(model(batch(rank))).backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_join_that_is_switched_off_sends_nothing(rank, transport):
    ours, _ = wrappers(transport)
    on = trained(ours, rank, 3)
    off = trained(ours, rank, 3, enable=False)
    for a, b in zip(on, off, strict=True):
        assert torch.equal(a, b)
    model = ours(seeded(Mlp))
    with model.join(enable=False):
        assert not model._join_config.enable
        loss_of(model(batch(rank))).backward()


@pytest.mark.beyond_torch("its error is that of the process group")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("buffers", [False, True])
@on_ranks(2)
def test_uneven_inputs_without_join_are_named_first(rank, transport, buffers):
    """Before what is for ranks that died."""
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)] if buffers else [torch.nn.Linear(4, 4)]
    model = torchddp.DDP(torch.nn.Sequential(*layers), transport=transport, timeout=timedelta(seconds=1.5))
    for _ in range(2):
        model(torch.randn(4, 4)).sum().backward()
    if rank == 1:
        return stay(rank)
    with pytest.raises(torchddp.TransportError) as caught:
        model(torch.randn(4, 4)).sum().backward()
        model(torch.randn(4, 4)).sum().backward()
    advice = re.findall(r"join\(\)|even_batches|drop_last=True|has died|_update_process_group", str(caught.value))
    first, rest = advice[:3], advice[3:]
    assert sorted(first) == ["drop_last=True", "even_batches", "join()"], caught.value
    assert rest in (["has died"], ["has died", "_update_process_group"]), caught.value
    stay(rank)
