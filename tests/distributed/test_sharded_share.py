"""Parameters that the ranks of a host have one copy of: what each may do to them, and when that is not possible."""

import copy
import ctypes
import os
import re

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.harness import run_ranks
from tests.models import same_on_all_ranks
from tests.sharded import Net, batch_of, loss_of, make_pair, small_net
from torchddp.optim import OSS
from torchddp.sharded.parameter_gather import ParameterGather
from torchddp.sharded.parameter_share import ParameterShare

ADAM = (torch.optim.AdamW, {"lr": 0.01})


def is_shared(model):
    (update,) = model._param_updates
    assert isinstance(update, (ParameterShare, ParameterGather))
    return isinstance(update, ParameterShare)


def own_bytes(model):
    """Memory of this process alone in the mappings that the parameters lie in, as the kernel counts it."""
    addresses = [p.data_ptr() for p in model.parameters()]
    total, inside = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                begin, end = (int(group, 16) for group in found.groups())
                inside = any(begin <= address < end for address in addresses)
            elif inside and line.startswith("Anonymous:"):
                total += int(line.split()[1]) * 1024
    return total


def one_after_the_other(rank, action):
    """So that what one rank has done would meet the next one's doing."""
    for turn in range(dist.get_world_size()):
        if turn == rank:
            action()
        dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_nobody_has_pages_of_its_own_after_a_step(world_size):
    def work(rank):
        pair = make_pair(*ADAM)
        shared, copied = [], make_pair(*ADAM, share_parameters=False)
        for step in range(3):
            pair.train(range(step, step + 1))
            shared.append(own_bytes(pair.sharded))
        copied.train(range(3))
        assert is_shared(pair.sharded) and not is_shared(copied.sharded)
        foreign = sum(p.nbytes for p, owner in copied.oss.param_to_rank.items() if owner != rank)
        assert own_bytes(copied.sharded) >= foreign > 0
        pair.assert_equal()
        copied.assert_equal()
        return shared

    assert run_ranks(work, world_size) == [[0, 0, 0]] * world_size


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_change_that_all_ranks_make_is_made_once(world_size, share):
    def work(rank):
        pair = make_pair(*ADAM, share_parameters=share)

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

    run_ranks(work, world_size)


def test_weights_that_are_swapped_for_evaluation():
    """As an average of the weights is: each rank keeps the weights, puts in others, and puts the weights back."""

    def work(rank):
        pair = make_pair(*ADAM)
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
        pair.train(range(5, 8))
        pair.assert_equal()

    run_ranks(work, 2)


@pytest.mark.parametrize("share", [True, False])
def test_of_a_change_that_one_rank_makes_the_owners_lasts(share):
    def work(rank):
        pair = make_pair(torch.optim.SGD, {"lr": 0.0}, make=small_net, share_parameters=share)
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

    run_ranks(work, 2)


def test_weights_that_are_clamped_after_every_step():
    """Pages that are changed again and again are copied in the end: more steps than that takes."""

    def work(rank):
        pair = make_pair(*ADAM, make=small_net)
        for step in range(30):
            pair.train(range(step, step + 1))
            for model, _ in pair.sides():
                for param in model.module.parameters():
                    param.data.clamp_(-0.2, 0.2)
        pair.train(range(30, 32))
        pair.assert_equal()

    run_ranks(work, 2)


def test_a_state_dict_that_is_loaded():
    def work(rank):
        pair = make_pair(*ADAM)
        pair.train(range(2))
        saved = copy.deepcopy(pair.sharded.module.state_dict())
        pair.train(range(2, 4))
        for model, _ in pair.sides():
            model.module.load_state_dict(saved)
        pair.train(range(4, 6))
        pair.assert_equal()
        assert own_bytes(pair.sharded) == 0
        assert not same_bits(saved, pair.sharded.module.state_dict())

    run_ranks(work, 2)


def same_bits(one, other):
    return all(torch.equal(one[key], other[key]) for key in one)


def test_frozen_and_thawed_again_and_again():
    """Each time parameters get other memory: the old is given back, and no file stays open."""

    def work(rank):
        pair = make_pair(*ADAM, reference_options={"find_unused_parameters": True})
        files = []
        for step in range(8):
            for model, _ in pair.sides():
                model.module.last.weight.requires_grad = bool(step % 2)
            pair.sharded.refresh_trainable()
            pair.train(range(step, step + 1))
            files.append(len(os.listdir("/proc/self/fd")))
        pair.assert_equal()
        assert is_shared(pair.sharded) and own_bytes(pair.sharded) <= 2 * pair.sharded.module.last.weight.nbytes + 8192
        return files

    for files in run_ranks(work, 2):
        assert files[2:] == [files[2]] * len(files[2:])


class Unknown(torch.optim.AdamW):
    """Might do anything with the parameters that it knows."""


@pytest.mark.parametrize(
    ("optim", "options", "oss_options"),
    [(Unknown, {}, {}), (torch.optim.Adafactor, {}, {}), (torch.optim.SGD, {}, {"broadcast_fp16": True})],
    ids=["derived", "Adafactor", "fp16"],
)
def test_optimizers_that_step_the_parameters_themselves(optim, options, oss_options):
    def work(rank):
        pair = make_pair(optim, {"lr": 0.01, **options}, oss_options=oss_options)
        pair.train(range(4))
        assert not is_shared(pair.sharded)
        assert same_on_all_ranks(list(pair.sharded.parameters()))
        if not oss_options:
            pair.assert_equal()

    run_ranks(work, 2)


def test_hooks_of_the_inner_optimizer_see_the_parameters():
    def work(rank):
        pair = make_pair(*ADAM)
        pair.train(range(2))
        seen = []

        def look(optimizer, args, kwargs):
            seen.extend(id(p) for group in optimizer.param_groups for p in group["params"])

        handle = pair.oss.optim.register_step_post_hook(look)
        pair.train(range(2, 4))
        assert is_shared(pair.sharded) and set(seen) <= {id(p) for p in pair.sharded.module.parameters()}
        handle.remove()
        pair.train(range(4, 6))
        pair.assert_equal()
        assert len(seen) == 2 * sum(owner == rank for owner in pair.oss.param_to_rank.values())
        assert own_bytes(pair.sharded) == 0

    run_ranks(work, 2)


def test_state_is_that_of_the_parameters():
    def work(rank):
        pair = make_pair(torch.optim.Adam, {"lr": 0.01, "amsgrad": True})
        pair.train(range(3))
        mine = {p for p, owner in pair.oss.param_to_rank.items() if owner == rank}
        assert set(pair.oss.state) == mine
        assert all(entry["exp_avg"].shape == p.shape for p, entry in pair.oss.state.items())
        pair.oss.consolidate_state_dict(0)
        if rank == 0:
            for index, entry in pair.plain.state_dict()["state"].items():
                for key, value in entry.items():
                    torch.testing.assert_close(pair.oss.state_dict()["state"][index][key], value, rtol=0, atol=0)

    run_ranks(work, 2)


def no_room(monkeypatch, rank):
    monkeypatch.setenv("TORCHDDP_SHM_LIMIT_MB", "2")


def locked_memory(monkeypatch, rank):
    if rank == 1:  # the kernel then gives up no page
        assert ctypes.CDLL(None).mlockall(2 | 4) == 0  # MCL_FUTURE | MCL_ONFAULT


@pytest.mark.parametrize(("prepare", "reason"), [(no_room, "LIMIT_MB leaves no room"), (locked_memory, "is locked")])
def test_where_it_is_not_possible_all_ranks_have_copies(monkeypatch, capfd, prepare, reason):
    def work(rank):
        prepare(monkeypatch, rank)
        # Not through shared memory that is too small: that alone would send all through gloo.
        pair = make_pair(*ADAM, make=lambda: Net(large=760), sync_models_at_startup=False)
        pair.train(range(3))
        pair.assert_equal()
        return is_shared(pair.sharded)

    assert run_ranks(work, 2) == [False, False]
    said = capfd.readouterr().err
    assert re.search(
        f"rank [01]: each rank of this host keeps its own copy of the parameters, because .*{reason}", said
    )


def test_no_ranks_of_one_host():
    def work(rank):
        pair = make_pair(*ADAM, transport="c10d")
        assert not is_shared(pair.sharded)

    run_ranks(work, 2)


def test_a_model_lives_on_when_its_owner_drops_it():
    def work(rank):
        pair = make_pair(*ADAM)
        pair.train(range(2))
        expected = [p.detach().clone() for p in pair.sharded.module.parameters()]
        dist.barrier()
        if rank == 0:
            pair.sharded = pair.oss = None
            net = small_net()
            loss_of(net(batch_of(rank, 0))).backward()
        dist.barrier()
        if rank == 1:
            assert all(map(torch.equal, pair.sharded.module.parameters(), expected))
            loss_of(pair.sharded.module(batch_of(rank, 0)))

    run_ranks(work, 2)


def test_ranks_whose_weights_differ_keep_them_until_the_first_step():
    def work(rank):
        torch.manual_seed(rank)
        net = small_net()
        before = [p.detach().clone() for p in net.parameters()]
        oss = OSS(net.parameters(), torch.optim.SGD, lr=0.0)
        model = torchddp.ShardedDataParallel(net, oss, sync_models_at_startup=False)
        assert is_shared(model) and all(map(torch.equal, net.parameters(), before))
        loss_of(model(batch_of(rank, 0))).backward()
        oss.step()
        assert all(
            torch.equal(p, value)
            for p, value in zip(net.parameters(), before, strict=True)
            if oss.param_to_rank[p] == rank
        )
        assert same_on_all_ranks(list(net.parameters()))

    run_ranks(work, 2)
