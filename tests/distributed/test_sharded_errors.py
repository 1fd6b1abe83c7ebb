"""What ShardedDataParallel refuses: on every rank, by name, with nothing half done."""

import copy

import pytest
import torch
from torch import nn

import torchddp
from tests.harness import on_ranks, run_outcomes, run_ranks
from tests.models import same_on_all_ranks, seeded
from tests.sharded import Net, batch_of, loss_of, make_pair, small_net
from torchddp.optim import OSS


def refused(build, error, match):
    """On both ranks."""

    def work(rank):
        with pytest.raises(error, match=match):
            build(rank)

    run_ranks(work, 2)


def sgd(params, **options):
    return OSS(params, torch.optim.SGD, lr=0.1, **options)


def test_parameters_of_another_module():
    def build(rank):
        torchddp.ShardedDataParallel(small_net(), sgd(small_net().parameters()))

    refused(build, ValueError, r"optimizer 0 holds \d+ parameters that are not the module's: parameter 0 of group 0")


def test_a_parameter_in_two_optimizers():
    def build(rank):
        net = small_net()
        torchddp.ShardedDataParallel(net, [sgd(net.parameters()), sgd(net.last.parameters())])

    refused(build, ValueError, "'last.weight' is in optimizer 0 and in optimizer 1")


def test_a_parameter_in_none():
    def build(rank):
        net = small_net()
        torchddp.ShardedDataParallel(net, sgd(net.first.parameters()))

    refused(build, ValueError, r"trainable parameters are in no optimizer: 'norm.weight'")


def test_a_plain_optimizer():
    def build(rank):
        net = small_net()
        torchddp.ShardedDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))

    refused(build, TypeError, "torchddp.optim.OSS, got SGD")


def test_the_same_optimizer_for_two_modules():
    def build(rank):
        net = small_net()
        optimizer = sgd(net.parameters())
        torchddp.ShardedDataParallel(net, optimizer)
        torchddp.ShardedDataParallel(net, optimizer)

    refused(build, ValueError, "belongs to another ShardedDataParallel already")


def test_a_wrapped_module():
    def build(rank):
        net = small_net()
        optimizer = sgd(net.parameters())
        with pytest.warns(UserWarning, match="already wrapped"):
            torchddp.ShardedDataParallel(torchddp.DistributedDataParallel(net), optimizer)

    refused(build, ValueError, "wrap once")


@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_buffer_size(size):
    def build(rank):
        net = small_net()
        torchddp.ShardedDataParallel(net, sgd(net.parameters()), reduce_buffer_size=size)

    refused(build, ValueError, "reduce_buffer_size must be a number of elements")


def test_one_rank_alone_has_a_wrong_optimizer():
    def work(rank):
        net, other = small_net(), small_net()
        optimizer = sgd((other if rank == 1 else net).parameters())
        torchddp.ShardedDataParallel(net, optimizer)

    errors = [outcome.error for outcome in run_outcomes(work, 2)]
    assert "ValueError: optimizer 0 holds" in errors[1]
    assert "ShardedDataParallel failed on other ranks" in errors[0] and "optimizer 0 holds" in errors[0]


def test_a_sparse_gradient():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(10, 4, sparse=True)
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.words(x))

    def build(rank):
        net = Words()
        torchddp.ShardedDataParallel(net, sgd(net.parameters()))

    refused(build, RuntimeError, r"'words.weight' has sparse gradients.*sparse=False")


def test_modes_that_reduce_to_all_ranks():
    def work(rank):
        net = small_net()
        model = torchddp.ShardedDataParallel(net, sgd(net.parameters()))
        with pytest.raises(RuntimeError, match="communication hook"):
            model.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(RuntimeError, match="join"):
            model.join()
        with pytest.raises(RuntimeError, match="share of the optimizer's state"):
            model._update_process_group(torch.distributed.group.WORLD)
        with pytest.raises(RuntimeError, match="plan"):
            model.replan()
        with pytest.raises(TypeError, match="copied or pickled"):
            copy.deepcopy(model)
        copied = copy.deepcopy(model.module)
        return torch.equal(copied.first.weight, model.module.first.weight)

    assert run_ranks(work, 2) == [True, True]


@on_ranks(2)
def test_state_of_another_model_changes_nothing():
    pair = make_pair(torch.optim.AdamW, make=small_net)
    pair.train(range(3))
    foreign = seeded(lambda: nn.Linear(3, 3))
    state = torch.optim.AdamW(foreign.parameters()).state_dict()
    before = copy.deepcopy(pair.oss.local_state_dict())
    with pytest.raises(ValueError):
        pair.oss.load_state_dict(state)
    after = pair.oss.local_state_dict()
    assert str(before["param_groups"]) == str(after["param_groups"]) and str(before["state"]) == str(after["state"])
    pair.train(range(3, 6))
    pair.assert_equal()


@on_ranks(2)
def test_consolidated_state_is_asked_for_elsewhere(rank):
    pair = make_pair(make=small_net)
    pair.train(range(2))
    pair.oss.consolidate_state_dict(recipient_rank=0)
    if rank == 1:
        with pytest.raises(RuntimeError, match="rank 1 has no consolidated state"):
            pair.oss.state_dict()
    else:
        assert len(pair.oss.state_dict()["state"]) == len(list(pair.sharded.parameters()))
    pair.train(range(2, 4))
    pair.assert_equal()


@on_ranks(2)
def test_new_parameters_must_be_the_modules():
    pair = make_pair(make=small_net)
    with pytest.raises(ValueError, match="1 of 1 new parameters"):
        pair.oss.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    pair.train(range(3))
    pair.assert_equal()


@on_ranks(2)
def test_a_step_with_a_graph_that_needs_the_old_values(rank):
    pair = make_pair(torch.optim.SGD, {"lr": 0.1})
    loss = loss_of(pair.sharded(batch_of(rank, 0)))
    loss.backward(retain_graph=True)
    pair.oss.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("where", ["backward", "step"])
def test_a_peer_that_dies(where, transport):
    def work(rank):
        import os

        pair = make_pair(transport=transport)
        pair.train(range(2))
        if where == "backward" and rank == 1:
            os._exit(3)
        loss_of(pair.sharded(batch_of(rank, 2))).backward()
        if rank == 1:
            os._exit(3)
        with pytest.raises(torchddp.TransportError, match="parameters"):
            pair.oss.step()
            pair.sharded.synchronize()
        return "noticed"

    outcomes = run_outcomes(work, 2, needed_ranks=[0])
    if where == "step":
        assert outcomes[0].value == "noticed", outcomes[0].error
    else:
        assert "TransportError" in outcomes[0].error
    assert outcomes[0].finished_s is not None and outcomes[0].finished_s < 30


def test_ranks_end_up_alike_whatever_they_began_with():
    def work(rank):
        net = seeded(Net, 10 + rank)
        model = torchddp.ShardedDataParallel(net, sgd(net.parameters()))
        assert same_on_all_ranks(list(model.parameters()))
        loss_of(model(batch_of(rank, 0))).backward()
        return True

    assert run_ranks(work, 3) == [True] * 3
