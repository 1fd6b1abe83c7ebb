"""DiLoCo, at once and in fragments, compared with simulations of all ranks in one process and with closed forms."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

from tests.averaging import EXACT, ROUNDING, assert_close, assert_same_on_all_ranks, make_net, sgd, train
from tests.comm_hooks import live_on
from tests.harness import each, gathered, in_child, on_ranks, through_a_file
from tests.models import same_on_all_ranks
from torchddp.averaging import DiLoCo, HierarchicalAverager
from torchddp.averaging.diloco import fragment_starts, plan_fragments


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def made(every, rank=0, **options):
    model = make_net(rank)
    return model, DiLoCo(model, sgd(model.parameters()), every, **options)


def assert_same_global_weights(optimizer):
    assert same_on_all_ranks(optimizer.global_weights.values())


@on_ranks(1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
def test_outer_steps_equal_a_simulation(rank, world_size):
    """Of all ranks in one process: all parameters at once, and in fragments."""
    for every, fragments, overlap, alpha in each([(4, 1, 0, 0.0), (6, 3, 1, 0.4)]):
        model, *simulated = (make_net(seed, torch.float64) for seed in (rank, *[0] * world_size))
        options = {"fragments": fragments, "overlap_steps": overlap, "alpha": alpha, "bucket_cap_mb": 0.002}
        optimizer = DiLoCo(model, adamw(model.parameters()), every, **options)
        inner = [adamw(net.parameters()) for net in simulated]
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        local = [dict(net.named_parameters()) for net in simulated]
        weights = {name: torch.nn.Parameter(local[0][name].detach().clone()) for name in names}
        outer = torch.optim.SGD(weights.values(), lr=0.7, momentum=0.9, nesterov=True)
        starts, due = fragment_starts(every, fragments), {}
        for step in range(1, 20):
            train(model, optimizer, rank, range(step, step + 1))
            for other in range(world_size):
                train(simulated[other], inner[other], other, range(step, step + 1))
            with torch.no_grad():
                if (in_round := (step - 1) % every + 1) in starts:
                    due[step + overlap] = {
                        name: weights[name].detach() - torch.stack([params[name] for params in local]).mean(0)
                        for name in plan_fragments(names, fragments)[starts.index(in_round)]
                    }
                merged = due.pop(step, {})
                for name in names:
                    weights[name].grad = merged.get(name)
                outer.step()
                for name, params in itertools.product(merged, local):
                    params[name].copy_(alpha * params[name] + (1 - alpha) * weights[name])
            assert_close(model, simulated[rank], **ROUNDING)
            if fragments == 1 and step % every == 0:
                assert_same_on_all_ranks(model)
        assert optimizer.steps == 19
        assert_same_global_weights(optimizer)
        optimizer.finish()
        assert_same_global_weights(optimizer)


@on_ranks(2)
def test_another_outer_optimizer_and_its_scheduler(rank):
    model, optimizer = made(2, outer_optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.outer_optimizer, 1, 0.0)
    train(model, optimizer, rank, range(2))
    scheduler.step()
    before = {name: w.clone() for name, w in optimizer.global_weights.items()}
    train(model, optimizer, rank, range(2, 4))
    assert all(torch.equal(before[name], w) for name, w in optimizer.global_weights.items())  # the learning rate is 0
    assert_same_on_all_ranks(model)


# By wire: the distance between codes, and bits per number.
WIRES = {"fp32": (1e-6, 32), "bf16": (2**-8, 16), "fp16": (2**-11, 16), "int8": (1 / 127, 8.125), "int4": (1 / 7, 4.5)}


@on_ranks(2, 3)
def test_wires(rank, world_size):
    """Messages are rounded, by no more than their format does, and all ranks get bitwise equal results."""
    for wire, (step, bits) in WIRES.items():
        model = make_net(0)
        optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.05), 3, 1.0, 0.0, wire=wire)
        weights = {name: w.clone() for name, w in optimizer.global_weights.items()}
        train(model, optimizer, rank, range(2))
        train(model, optimizer.optim, rank, range(2, 3))
        moved = {name: weights[name] - p.detach() for name, p in model.named_parameters() if name in weights}
        peak = max(float(m.abs().max()) for m in moved.values())
        for tensor in moved.values():
            dist.all_reduce(tensor)
        optimizer.after_step()
        assert_same_on_all_ranks(model)
        # At most twice half a code's width: before the sum and after it.
        for name, weight in optimizer.global_weights.items():
            expected = weights[name] - moved[name] / world_size
            assert float((weight - expected).abs().max()) <= 1.2 * peak * step + 1e-6, (wire, name)
        if wire != "fp32":
            messages = optimizer.traffic.payload_bytes / 4 * bits / 8 * (1 if world_size == 2 else 4 / 3)
            assert 0.98 * messages <= optimizer.traffic.wire_bytes <= 1.2 * messages + 64, wire


@on_ranks(2)
def test_parameters_of_16_bits_have_global_weights_in_fp32(rank):
    param = torch.nn.Parameter(torch.full((40,), 256.0, dtype=torch.bfloat16))
    optimizer = DiLoCo([param], torch.optim.SGD([param], lr=0.05), 1, outer_lr=0.25, outer_momentum=0.0)
    for _ in range(4):
        param.grad = torch.full_like(param, 2 / 0.05)  # a step of 2; bfloat16's spacing just below 256 is 1
        optimizer.step()
        assert_same_global_weights(optimizer)
    (weight,) = optimizer.global_weights.values()
    assert torch.equal(weight, torch.full_like(weight, 254.0)), weight  # four times 2 / 4
    assert torch.equal(param, torch.full_like(param, 254.0))


@on_ranks(2)
def test_inner_steps_do_not_wait_for_a_fragment_in_flight(rank):
    model, optimizer = made(8, wire="int4", fragments=2, overlap_steps=3)
    train(model, optimizer, rank, range(3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:  # its part of the fragment that starts in step 4 comes after the other's next steps
        store.wait(["rank 0 goes on"])
    train(model, optimizer, rank, range(3, 6))
    store.set("rank 0 goes on", "")
    train(model, optimizer, rank, range(6, 7))
    assert_same_global_weights(optimizer)


@on_ranks(2)
def test_resumes_exactly(rank):
    """A run that saves, one resumed from its checkpoint, and one that never saves end bitwise equal."""
    in_fragments = {"sync_every": 8, "fragments": 2, "overlap_steps": 2, "alpha": 0.3}
    for options, saved_after in (
        ({"sync_every": 4}, [4, 6]),  # at the end of a round, and in the middle
        (in_fragments, [7, 8, 9]),  # a fragment starts after 8, and is merged after 10
    ):

        def made(options=options):
            model = make_net(0)
            return model, DiLoCo(model, adamw(model.parameters()), wire="int8", **options)

        uninterrupted, optimizer = made()
        train(uninterrupted, optimizer, rank, range(15))
        for steps in saved_after:
            model, optimizer = made()
            train(model, optimizer, rank, range(steps))
            saved = through_a_file((model.state_dict(), optimizer.state_dict()))
            train(model, optimizer, rank, range(steps, 15))
            assert_close(model, uninterrupted, **EXACT)

            again, resumed = made()
            again.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            train(again, resumed, rank, range(steps, 15))
            assert_close(again, uninterrupted, **EXACT)


@on_ranks(3)
def test_only_rank_0_saves_while_a_fragment_is_in_flight(rank):
    model, optimizer = made(4, wire="int4", overlap_steps=3)
    train(model, optimizer, rank, range(5))
    if rank == 0:
        state = optimizer.state_dict()
        assert "on_the_way" in state["diloco"]
    dist.barrier()
    train(model, optimizer, rank, range(5, 7))
    assert_same_on_all_ranks(model)
    assert 0 < optimizer.traffic.wire_bytes < 0.25 * optimizer.traffic.payload_bytes
    _, other = made(4, fragments=2)
    if rank == 0:
        with pytest.raises(ValueError, match="fragments are different now"):
            other.load_state_dict(state)
        assert other.steps == 0  # nothing was loaded


@on_ranks(1)
def test_a_state_that_does_not_fit_changes_nothing():
    def made(width, *, by_layer=False, **options):
        layer = torch.nn.Linear(8, width)
        groups = [{"params": [p]} for p in layer.parameters()] if by_layer else layer.parameters()
        return DiLoCo(layer, sgd(groups), 4, **options)

    optimizer = made(16)
    before = [w.clone() for w in (*optimizer.global_weights.values(), *optimizer.fragments[0][0].named.values())]
    optimizer.steps = 3
    for other, error in (
        (made(1), r"'weight' has shape \[1, 8\] in it, \[16, 8\] here"),
        (
            made(16, outer_optimizer=adamw),
            "another outer optimizer: its groups have 'amsgrad', .* and lack 'dampening'",
        ),
        (
            made(16, outer_optimizer=lambda ps: torch.optim.SGD([{"params": [p]} for p in ps], lr=0.1)),
            r"groups of \[1, 1\] parameters in the state dict, \[2\] here",
        ),
        (made(16, by_layer=True), "different number of parameter groups"),
        (sgd(torch.nn.Linear(8, 16).parameters()), "by another optimizer, or went through get_state_dict"),
    ):
        with pytest.raises(ValueError, match=error):
            optimizer.load_state_dict(other.state_dict())
    after = [*optimizer.global_weights.values(), *optimizer.fragments[0][0].named.values()]
    assert all(map(torch.equal, before, after)) and optimizer.steps == 3


@on_ranks(2)
def test_a_checkpoint_is_loaded_after_ranks_have_differed(rank):
    model, optimizer = made(2)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.steps = 2 * rank
    with pytest.raises(RuntimeError, match=f"rank {rank} is at step {2 + 2 * rank} with SGD"):
        train(model, optimizer, rank, range(2))
    optimizer.load_state_dict(saved)
    train(model, optimizer, rank, range(2))
    assert_same_on_all_ranks(model)
    train(model, optimizer, rank, range(rank))
    optimizer.synchronize()  # whatever the count
    assert_same_on_all_ranks(model)


@on_ranks(2)
def test_a_forked_child_does_not_wait_for_a_fragment_in_flight(rank):
    model, optimizer = made(4, overlap_steps=3)
    train(model, optimizer, rank, range(5))

    def save():
        with pytest.raises(RuntimeError, match="save checkpoints in the process that created DiLoCo"):
            optimizer.state_dict()

    assert in_child(save)
    train(model, optimizer, rank, range(5, 7))
    assert_same_on_all_ranks(model)


@on_ranks(2)
def test_buffers(rank):
    model, optimizer = made(2, buffers=True)
    train(model, optimizer, rank, range(1))
    train(model, optimizer.optim, rank, range(1, 2))
    mean = model.norm.running_mean.clone()
    dist.all_reduce(mean)
    optimizer.after_step()
    torch.testing.assert_close(model.norm.running_mean, mean / 2)
    assert model.norm.num_batches_tracked == 2


@on_ranks(2)
def test_parameters_thawed_or_frozen_later(rank):
    # A thawed one is an error.
    model = make_net()
    model.embed.requires_grad_(False)
    optimizer = DiLoCo(model, sgd(model.parameters()), 2)
    train(model, optimizer, rank, range(3))
    model.embed.requires_grad_(True)
    for synchronize in (lambda: train(model, optimizer, rank, range(3, 4)), optimizer.synchronize):
        with pytest.raises(ValueError, match=r"the optimizer steps params\[1\] .*, which is not averaged"):
            synchronize()

    # Frozen ones stay.
    model, optimizer = made(2)
    train(model, optimizer, rank, range(4))
    synchronized, diverged = model.embed.weight, model.blocks[0].weight
    synchronized.requires_grad_(False)
    before = synchronized.detach().clone()
    train(model, optimizer, rank, range(4, 5))
    diverged.requires_grad_(False)
    for start in (5, 7):
        train(model, optimizer, rank, range(start, start + 1))
        assert_same_on_all_ranks(model)
        assert torch.equal(synchronized, before)
        if start == 5:
            merged = diverged.detach().clone()
        train(model, optimizer, rank, range(start + 1, start + 2))
    assert torch.equal(diverged, merged)


@on_ranks(2)
def test_a_rank_changes_the_memory_format(rank):
    model = torch.nn.Conv2d(2, 3, 2)
    optimizer = DiLoCo(model, sgd(model.parameters()), 1, outer_lr=1.0, outer_momentum=0.0)
    if rank == 1:
        model.to(memory_format=torch.channels_last)
    moved = torch.arange(24.0).view(3, 2, 2, 2)
    wanted = model.weight.detach() + moved
    with torch.no_grad():
        model.weight.add_(moved)
    optimizer.after_step()
    torch.testing.assert_close(model.weight.detach(), wanted)


@on_ranks(2)
def test_an_outer_step_out_of_turn(rank):
    """With a fragment in transit, which is merged first: then all parameters are the same on all ranks."""
    model, optimizer = made(6, fragments=3, overlap_steps=1, buffers=True)
    train(model, optimizer, rank, range(2))
    optimizer.synchronize()
    assert_same_on_all_ranks(model)
    assert same_on_all_ranks([model.norm.running_mean])
    train(model, optimizer, rank, range(2, 7))
    optimizer.finish()
    assert_same_global_weights(optimizer)


@on_ranks(4)
def test_two_hosts(rank):
    """Ranks of a host are summed exactly; only messages between hosts are rounded."""
    live_on("aabb", rank)
    model, optimizer = made(2, rank, outer_lr=1.0, outer_momentum=0.0, wire="int8")
    other, in_fragments = made(4, rank, wire="int8", fragments=2, overlap_steps=1, alpha=0.5)
    train(model, optimizer, rank, range(2))
    assert_same_on_all_ranks(model)
    train(other, in_fragments, rank, range(8))
    in_fragments.finish()
    assert_same_global_weights(in_fragments)
    # Opposite changes by two ranks of a host cancel.
    before = {name: w.clone() for name, w in optimizer.global_weights.items()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0 - 2 * (rank % 2))
    optimizer.synchronize()
    for name, weight in optimizer.global_weights.items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-6)


@on_ranks(3)
def test_a_process_group_of_some_ranks(rank):
    group = dist.new_group([1, 2])
    model = make_net(rank)
    before = model.embed.weight.detach().clone()
    if rank > 0:
        optimizer = DiLoCo(model, sgd(model.parameters()), 2, wire="int8", process_group=group)
        assert_close(model, make_net(1), **EXACT)  # rank 0 of the group
        train(model, optimizer, rank, range(2))
    theirs = gathered(model.embed.weight.detach())
    assert torch.equal(theirs[1], theirs[2]) and not torch.equal(theirs[0], theirs[1])
    assert torch.equal(theirs[0], before) == (rank == 0)
    with pytest.raises(ValueError, match="must divide the 3 ranks of the process group, got 2"):
        HierarchicalAverager(model, {1: 2, 2: 3})
