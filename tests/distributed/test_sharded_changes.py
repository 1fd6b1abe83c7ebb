"""Parameters of a ShardedDataParallel that programs change between steps, on all ranks or on one."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from tests.harness import each, on_ranks
from tests.models import same_on_all_ranks
from tests.sharded import make_pair, small_net


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
def test_weights_that_are_swapped_for_evaluation(rank):
    """As an average of the weights is: each rank keeps the weights, puts in others, and puts the weights back."""
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
    pair.train(range(5, 8))
    pair.assert_equal()


@on_ranks(2)
def test_of_a_change_that_one_rank_makes_the_owners_lasts(rank):
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
def test_changes_between_steps():
    # A state dict that is loaded.
    pair = make_pair()
    pair.train(range(2))
    saved = copy.deepcopy(pair.sharded.module.state_dict())
    pair.train(range(2, 4))
    for model, _ in pair.sides():
        model.module.load_state_dict(saved)
    pair.train(range(4, 6))
    pair.assert_equal()
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
        pair.train(range(step, step + 1))
    pair.assert_equal()

    # A static graph stays static.
    pair = make_pair(static_graph=True)
    pair.train(range(2))
    for model, _ in pair.sides():
        model.module.first.requires_grad_(False)
    pair.sharded.refresh_trainable()
    pair.rewrap()
    pair.train(range(2, 4))
    pair.assert_equal()
    assert "can_set_static_graph" not in pair.sharded._get_ddp_logging_data()


@on_ranks(2)
def test_new_parameters_get_rank_0s_values_as_all_do_at_startup(rank):
    for sends in each([True, False]):
        pair = make_pair(make=small_net, sync_models_at_startup=sends)
        extra = nn.Parameter(torch.full((3,), float(rank)))
        pair.sharded.module.register_parameter("extra", extra)
        pair.oss.add_param_group({"params": [extra]})
        assert extra.tolist() == [0.0 if sends else float(rank)] * 3
        assert "extra" in [spec.name for spec in pair.sharded.session.specs]
