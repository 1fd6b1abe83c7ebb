"""join() with each of its options, alone and with other joinables, over shared memory and the process group."""

import re
from datetime import timedelta

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import each, on_ranks, over_both, stay
from tests.models import Mlp, batch, loss_of, seeded, step_on


def trained(cls, rank, steps, options, **join_options):
    """Train two models in one join; return their final parameters."""
    models = [cls(seeded(Mlp, seed), bucket_cap_mb=0.001, **options) for seed in (0, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with Join(models, **join_options):
        for step in range(steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model(batch(rank, step))).backward()
                optimizer.step()
    return [p.detach() for model in models for p in model.parameters()]


@pytest.mark.parametrize(("transport", "world_size"), [("c10d", 3), ("shm", 2), ("shm", 3)])
@on_ranks()
def test_several_joinables_and_divisors(rank, transport):
    """Also if a rank has no input at all."""
    for divide, steps in each([True, False], [1 + 2 * rank, 2 * rank]):
        ours, theirs = (
            trained(cls, rank, steps, options, divide_by_initial_world_size=divide)
            for cls, options in ((torchddp.DDP, {"transport": transport}), (TorchDDP, {}))
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@over_both
@on_ranks(3)
def test_early_termination_raises_on_all_ranks_at_once(rank, transport):
    with pytest.raises(RuntimeError, match="exhausted"):
        trained(torchddp.DDP, rank, 2 + rank, {"transport": transport}, throw_on_early_termination=True)
    # The group can be used again.
    step_on(torchddp.DDP(seeded(Mlp), transport=transport), rank)


@over_both
@on_ranks(2)
def test_a_join_that_is_switched_off_sends_nothing(rank, transport):
    on, off = (trained(torchddp.DDP, rank, 3, {"transport": transport}, enable=enable) for enable in (True, False))
    torch.testing.assert_close(on, off, rtol=0, atol=0)
    model = torchddp.DDP(seeded(Mlp), transport=transport)
    with model.join(enable=False):
        assert not model._join_config.enable
        step_on(model, rank)


@pytest.mark.beyond_torch("its error is that of the process group")
@over_both
@pytest.mark.parametrize("buffers", [False, True])
@on_ranks(2)
def test_uneven_inputs_without_join_are_named_first(rank, transport, buffers):
    """Errors mention uneven inputs before lost ranks."""
    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)] if buffers else [torch.nn.Linear(4, 4)]
    model = torchddp.DDP(torch.nn.Sequential(*layers), transport=transport, timeout=timedelta(seconds=6))
    for _ in range(2):
        model(torch.randn(4, 4)).sum().backward()
    if rank == 1:
        return stay(rank)
    with pytest.raises(torchddp.TransportError) as caught:
        model(torch.randn(4, 4)).sum().backward()
        model(torch.randn(4, 4)).sum().backward()
    advice = re.findall(r"join\(\)|even_batches|drop_last=True|a peer died|_update_process_group", str(caught.value))
    first, rest = advice[:3], advice[3:]
    assert sorted(first) == ["drop_last=True", "even_batches", "join()"], caught.value
    assert rest in (["a peer died"], ["a peer died", "_update_process_group"]), caught.value
    stay(rank)
