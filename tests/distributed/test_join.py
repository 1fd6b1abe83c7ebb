"""join() with each of its options, alone and with other joinables, over shared memory and the process group."""

import os
import re
from datetime import timedelta

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import each, on_ranks, over_both, stay
from tests.models import Branches, Mlp, assert_grads, batch, grads_of, loss_of, seeded, step_on


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


UNUSED = {"find_unused_parameters": True}
SKIPS = {"skip_all_reduce_unused_params": True}


@over_both
@on_ranks(3)
def test_ranks_without_inputs_send_what_the_others_do(rank, transport):
    """Also from the first step on, in which the others record a static graph; then all ranks train."""

    def gradients(cls, options, steps):
        model = cls(seeded(Branches), bucket_cap_mb=0.0001, **options)
        with model.join():
            for step in range(steps):
                model.zero_grad()
                loss_of(model(batch(rank, step, 5, 4), "left")).backward()
        for step in range(3):
            model.zero_grad()
            loss_of(model(batch(rank, step, 5, 4), "left")).backward()
            yield grads_of(model)

    for options, steps in each(
        [
            UNUSED,
            {"static_graph": True},
            {**UNUSED, "static_graph": True},
            {**UNUSED, **SKIPS},
            {"static_graph": True, **SKIPS},
        ],
        [2 * rank, 2 + rank],
    ):
        ours = gradients(torchddp.DDP, {"transport": transport, **options}, steps)
        for mine, theirs in zip(ours, gradients(TorchDDP, UNUSED, steps), strict=True):
            assert_grads(
                {n: g for n, g in mine.items() if g is not None}, {n: theirs[n] for n in mine if mine[n] is not None}
            )
            assert mine["right.weight"] is None and mine["left.weight"] is not None


@on_ranks(4)
def test_waits_between_two_hosts(rank):
    """For weights that are shared over memory, and for a hook or a sparse gradient in the process group."""
    os.environ["TORCHDDP_HOST_ID"] = "aabb"[rank]

    def gradients(transport, sparse, hook):
        model = torchddp.DDP(
            seeded(lambda: torch.nn.Embedding(9, 4, sparse=sparse)), weighted=True, transport=transport
        )
        if hook is not None:
            model.register_comm_hook(None, hook)
        with model.join():
            for step in range(1 + 2 * rank):
                model.zero_grad()
                model.weigh(1 + rank)
                model(torch.tensor([rank, 4 + step % 5])).sum().backward()
        return model.module.weight.grad.to_dense()

    for sparse, hook in each([False, True], [None, allreduce_hook]):
        torch.testing.assert_close(gradients("shm", sparse, hook), gradients("c10d", sparse, hook))


@over_both
@on_ranks(3)
def test_a_step_without_any_weight_raises_on_all_ranks(rank, transport):
    model = torchddp.DDP(seeded(Mlp), transport=transport, weighted=True)
    with pytest.raises(ValueError, match=f"rank {rank}, .*no rank gave this step a weight above 0"), model.join():
        for step in range(1 + rank):
            model.weigh(0 if step == 1 else 1)
            step_on(model, rank)
    model.weigh(1)
    step_on(model, rank)  # the group can be used again


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
    advice = re.findall(r"join\(\)|even_batches|drop_last=True|a peer died|update_process_group", str(caught.value))
    first, rest = advice[:3], advice[3:]
    assert sorted(first) == ["drop_last=True", "even_batches", "join()"], caught.value
    assert rest in (["a peer died"], ["a peer died", "update_process_group"]), caught.value
    stay(rank)
