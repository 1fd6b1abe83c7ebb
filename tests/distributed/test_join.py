"""join() with each of its options, alone and with other joinables, and even_batches(), which does without it."""

import itertools
import re
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import each, on_ranks, run_outcomes, stay
from tests.models import Branches, Mlp, assert_grads, batch, grads_of, loss_of, seeded, step_on
from torchddp.sync import even_batches


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


@on_ranks(3)
def test_ranks_without_inputs_send_what_the_others_do(rank):
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
        ours = gradients(torchddp.DDP, options, steps)
        for mine, theirs in zip(ours, gradients(TorchDDP, UNUSED, steps), strict=True):
            assert_grads(
                {n: g for n, g in mine.items() if g is not None}, {n: theirs[n] for n in mine if mine[n] is not None}
            )
            assert mine["right.weight"] is None and mine["left.weight"] is not None


@on_ranks(3)
def test_early_termination_raises_on_all_ranks_at_once(rank):
    with pytest.raises(RuntimeError, match="exhausted"):
        trained(torchddp.DDP, rank, 2 + rank, {}, throw_on_early_termination=True)
    # The group can be used again.
    step_on(torchddp.DDP(seeded(Mlp)), rank)


@on_ranks(2)
def test_a_join_that_is_switched_off_sends_nothing(rank):
    on, off = (trained(torchddp.DDP, rank, 3, {}, enable=enable) for enable in (True, False))
    torch.testing.assert_close(on, off, rtol=0, atol=0)
    model = torchddp.DDP(seeded(Mlp))
    with model.join(enable=False):
        assert not model._join_config.enable
        step_on(model, rank)


@pytest.mark.beyond_torch("its error is that of the process group")
@pytest.mark.parametrize(("transport", "buffers"), [("shm", False), ("c10d", True)])
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
    assert sorted(advice[:3]) == ["drop_last=True", "even_batches", "join()"], caught.value
    assert ",".join(advice[3:]) in ("", "a peer died", "update_process_group", "a peer died,update_process_group")
    stay(rank)


# The number of batches of each rank.
LENGTHS = [(5, 5, 5, 5), (3, 5, 4, 6), (6, 4, 5, 3), (1, 2, 9, 9), (4, 0, 2, 1), (0, 0, 0, 0)]


def test_without_a_process_group():
    assert list(even_batches(range(3))) == [0, 1, 2]


@on_ranks(1, 4)
def test_all_ranks_get_as_many_batches_in_their_own_order(rank, world_size):
    for lengths in LENGTHS:
        own = [100 * rank + number for number in range(lengths[rank])]
        got = list(even_batches(iter(own)))
        assert got == own[: min(lengths[:world_size])]
        # A list can be iterated again; a group may be given.
        assert list(even_batches(own, process_group=dist.group.WORLD)) == got


@pytest.mark.parametrize(("transport", "world_size"), [("c10d", 3), ("shm", 2)])
@on_ranks()
def test_training_with_uneven_loaders(rank, transport, world_size):
    """Equal to loaders truncated to the shortest, with buffers and nested loops."""
    parameters = []
    for uneven in (True, False):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(8), Mlp(dtype=torch.float32))
        model = torchddp.DistributedDataParallel(module, transport=transport, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for epoch in range(3):
            lengths = [3 + (2 * r + epoch) % 4 for r in range(world_size)]
            loader = (batch(rank, 10 * epoch + i, dtype=torch.float32) for i in range(lengths[rank]))
            for inputs in even_batches(loader, model) if uneven else itertools.islice(loader, min(lengths)):
                if uneven:
                    assert len(list(even_batches(range(2 + rank), model))) == 2
                loss_of(model(inputs)).backward()
                optimizer.step()
                optimizer.zero_grad()
        parameters.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*parameters, rtol=1e-5, atol=1e-6)


@on_ranks(3)
def test_torchs_models_and_subgroups(rank):
    plain = torch.nn.parallel.DistributedDataParallel(seeded(Mlp))
    assert len(list(even_batches(range(2 + rank), plain))) == 2
    pair = dist.new_group([1, 2])
    if rank > 0:
        assert len(list(even_batches(range(2 * rank), process_group=pair))) == 2
    for wrong in (seeded(Mlp), 7, "model"):
        with pytest.raises(TypeError, match="model must be a DistributedDataParallel or None, got "):
            even_batches([], wrong)
    with pytest.raises(TypeError, match="process_group must be a process group or None, got Mlp"):
        even_batches([], process_group=seeded(Mlp))
    with pytest.raises(TypeError, match="with process_group="):
        even_batches([], plain, process_group=pair)


@on_ranks(3)
def test_an_exception_in_one_loader_ends_all_loops(rank):
    class Broken:
        def __iter__(self):
            raise OSError("no such file")

    def broken_after(count):
        yield from range(count)
        raise OSError("no such file")

    for broken, at in ((broken_after(0), 0), (broken_after(2), 2), (Broken(), 0)):
        got = []
        kind, words = (OSError, "^no such file$") if rank == 1 else (RuntimeError, f"rank {rank} ends at batch {at}")
        with pytest.raises(kind, match=words) as caught:
            got.extend(even_batches(broken if rank == 1 else range(9)))
        assert got == list(range(at)) and (rank == 1 or "on rank 1" in str(caught.value))
        # All ranks can run the next loop.
        assert list(even_batches(range(3 + rank))) == [0, 1, 2]


@on_ranks(2)
def test_loops_left_by_all_at_the_same_batch(rank):
    for stop in (0, 2, 1):
        got = []
        for value in even_batches(range(5 + rank)):
            got.append(value)
            if value == stop:
                break
        assert got == list(range(stop + 1))
    assert len(list(even_batches(range(4 + rank)))) == 4


@pytest.mark.slow
def test_if_one_rank_leaves_a_loop_the_others_raise():
    def work(rank):
        for value in even_batches(range(6)):
            if rank == 1 and value == 2:
                signal.pause()  # it stays connected until the other has raised, and is killed then
        return "ended"

    outcomes = run_outcomes(work, 2, group_timeout_s=8.0, needed_ranks=[0])
    assert "TransportError" in (outcomes[0].error or ""), outcomes[0]
    assert "could not agree on batch 4" in outcomes[0].error and "left its loop" in outcomes[0].error


@on_ranks(2)
def test_batches_are_prefetched_and_messages_overlap_the_step(rank):
    log = []

    def loader():
        for number in range(3):
            log.append(("got", number))
            yield number

    for value in even_batches(loader()):
        log.append(("step", value))
    assert log == [("got", 0), ("got", 1), ("step", 0), ("got", 2), ("step", 1), ("step", 2)]
    # A late rank doesn't delay the other ranks' steps.
    store = dist.distributed_c10d._get_default_store()
    for value in even_batches(range(2)):
        if value == 0 and rank == 1:
            store.wait(["rank 0 goes on"])
        elif value == 0:
            store.set("rank 0 goes on", "")
