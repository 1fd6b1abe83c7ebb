"""Parameters of a ShardedDataParallel that programs change between steps; what it holds: its share, and little more."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import each, on_ranks
from tests.models import same_on_all_ranks
from tests.sharded import batch_of, loss_of, make_pair, small_net
from tests.whole_buckets import WholeSharded
from torchddp.optim import OSS


def one_after_the_other(rank, action):
    """So that what one rank has done would meet the next one's doing."""
    for turn in range(dist.get_world_size()):
        if turn == rank:
            action()
        dist.barrier()


@on_ranks(2, 3)
def test_a_change_that_all_ranks_make_is_made_once(rank):
    pair = make_pair()

    def decay():
        for model, _ in pair.sides():
            for param in model.module.parameters():
                param.data.mul_(0.75)

    for step in range(6):
        pair.train(range(step, step + 1))
        if step % 2:
            one_after_the_other(rank, decay)
            pair.assert_equal()
    pair.assert_equal()


@on_ranks(2)
def test_changes_for_evaluation_or_by_one_rank(rank):
    # As an average of the weights is: each rank keeps the weights, puts in others, and puts the weights back.
    pair = make_pair()
    params = list(pair.sharded.module.parameters())
    average = [p.detach().clone() for p in params]
    for step in range(5):
        pair.train(range(step, step + 1))
        with torch.no_grad():
            torch._foreach_lerp_(average, params, 0.5)
        kept = []
        one_after_the_other(rank, lambda kept=kept: kept.extend(p.detach().clone() for p in params))
        one_after_the_other(rank, lambda: torch._foreach_copy_([p.data for p in params], average))
        assert all(map(torch.equal, params, average))
        one_after_the_other(rank, lambda kept=kept: torch._foreach_copy_([p.data for p in params], kept))
        pair.assert_equal()
    pair.train_alike(range(5, 8))

    # Of a change that one rank makes, the owner's lasts.
    pair = make_pair(torch.optim.SGD, {"lr": 0.0}, make=small_net)
    params = list(pair.sharded.module.parameters())
    before = [p.detach().clone() for p in params]
    if rank == 0:
        for param in params:
            param.data.add_(1)
    dist.barrier()
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value + 1 if rank == 0 else value)
    pair.train(range(1))
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value + 1 if pair.oss.param_to_rank[param] == 0 else value)
    assert same_on_all_ranks(params)


@on_ranks(2)
def test_changes_of_all_kinds(rank):
    # A state dict that is loaded.
    pair = make_pair()
    pair.train(range(2))
    saved = copy.deepcopy(pair.sharded.module.state_dict())
    pair.train(range(2, 4))
    for model, _ in pair.sides():
        model.module.load_state_dict(saved)
    pair.train_alike(range(4, 6))
    now = pair.sharded.module.state_dict()
    assert not all(torch.equal(saved[key], now[key]) for key in saved)

    # Each time parameters are frozen or thawed they get other memory: a frozen one keeps nobody else's.
    pair = make_pair(reference_options={"find_unused_parameters": True})
    weight = pair.sharded.module.last.weight
    for step in range(8):
        before = weight.data_ptr()
        for model, _ in pair.sides():
            model.module.last.weight.requires_grad = bool(step % 2)
        pair.sharded.refresh_trainable()
        assert weight.data_ptr() != before
        pair.train_alike(range(step, step + 1))

    # A static graph stays static.
    pair = make_pair(static_graph=True)
    pair.train(range(2))
    for model, _ in pair.sides():
        model.module.first.requires_grad_(False)
    pair.sharded.refresh_trainable()
    pair.rewrap()
    pair.train_alike(range(2, 4))
    assert "can_set_static_graph" not in pair.sharded._get_ddp_logging_data()

    # New parameters get rank 0's values, as all do at startup.
    for sends in each([True, False]):
        pair = make_pair(make=small_net, sync_models_at_startup=sends)
        extra = nn.Parameter(torch.full((3,), float(rank)))
        pair.sharded.module.register_parameter("extra", extra)
        pair.oss.add_param_group({"params": [extra]})
        assert extra.tolist() == [0.0 if sends else float(rank)] * 3
        assert "extra" in [spec.name for spec in pair.sharded.session.specs]


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def even(width, count=36):
    """Layers that can be shared out evenly: `count` of `width` squared elements."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(count)]
    return nn.Sequential(*itertools.chain(*((layer, nn.Tanh()) for layer in layers)))


@pytest.mark.rest_is_thorough("2-*", "3-alone-c10d")
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("width", [128, 520], ids=["in-buckets", "alone"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@on_ranks()
def test_each_rank_holds_its_share(world_size, width, transport):
    net = even(width)
    oss = OSS(net.parameters(), torch.optim.AdamW, lr=0.01)
    # A bucket for each layer, so that what passes through is little of the whole.
    model = torchddp.ShardedDataParallel(net, oss, transport=transport, reduce_buffer_size=128 * 128)
    for _ in range(3):
        loss_of(model(torch.randn(4, width))).backward()
        grads = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
        held = model.reducer.bucket_memory_bytes
        oss.step()
        oss.zero_grad()
    state = bytes_of(t for entry in oss.state.values() for t in entry.values() if t.numel() > 1)
    share, whole = 1 / world_size, sum(p.nbytes for p in net.parameters())
    assert grads / whole == pytest.approx(share) and state / (2 * whole) == pytest.approx(share)
    # Small gradients of the others pass through memory of which eight blocks are kept.
    assert share <= held / whole <= share + (9 / 36 if width == 128 else 0)


@on_ranks(2)
def test_gradients_that_were_given_away_are_gone_before_backward_ends(rank):
    """At most a few of another rank's large gradients are alive at once."""
    net = even(520, count=16)
    oss = OSS(net.parameters(), torch.optim.SGD, lr=0.01)
    model = torchddp.ShardedDataParallel(net, oss, transport="shm")
    alive = []
    foreign = [p for p in net.parameters() if oss.param_to_rank[p] != rank]
    net[0].register_full_backward_hook(lambda *_: alive.append(sum(p.grad is not None for p in foreign)))
    for _ in range(3):
        model(torch.randn(4, 520, requires_grad=True)).square().mean().backward()
        oss.step()
        oss.zero_grad()
    assert alive and max(alive) == 0


@on_ranks(1, 2, 3)
def test_the_way_of_devices_gives_the_same_bits(rank, monkeypatch, world_size):
    monkeypatch.setattr(torchddp, "ShardedDataParallel", WholeSharded)
    for transport in each(["shm", "c10d"] if world_size > 1 else ["c10d"]):
        pair = make_pair(torch.optim.AdamW, transport=transport)
        assert type(pair.sharded) is WholeSharded
        for step in range(6):
            if step % 2:
                for model, _ in pair.sides():
                    with model.no_sync():
                        loss_of(model(batch_of(rank, 50 + step))).backward()
            pair.backward(step)
            pair.assert_sharded()
            pair.step(set_to_none=step % 3 == 0)
        pair.assert_equal()
