"""What ShardedDataParallel refuses: on every rank, by name, with nothing half done."""

import copy
import os

import pytest
import torch
from torch import nn

import torchddp
from tests.harness import each, on_ranks, run_outcomes
from tests.models import seeded
from tests.sharded import batch_of, loss_of, make_pair, small_net
from torchddp import ShardedDataParallel
from torchddp.optim import OSS


def sgd(params):
    return OSS(params, torch.optim.SGD, lr=0.1)


class Words(nn.Module):
    """Has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 2)


FOREIGN = r"optimizer 0 holds \d+ parameters that are not the module's: parameter 0 of group 0"
SIZE = "reduce_buffer_size must be a number of elements"
REFUSED = [
    (lambda net: sgd(small_net().parameters()), {}, ValueError, FOREIGN),
    (
        lambda net: [sgd(net.parameters()), sgd(net.last.parameters())],
        {},
        ValueError,
        "'last.weight' is in optimizer 0 and",
    ),
    (
        lambda net: sgd(net.first.parameters()),
        {},
        ValueError,
        "trainable parameters are in no optimizer: 'norm.weight'",
    ),
    (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), {}, TypeError, "torchddp.optim.OSS, got SGD"),
    *((lambda net: sgd(net.parameters()), {"reduce_buffer_size": n}, ValueError, SIZE) for n in (-1, 1.5, True)),
]


@on_ranks(2)
def test_what_can_not_be_wrapped():
    for make, options, error, words in each(REFUSED):
        net = small_net()
        with pytest.raises(error, match=words):
            ShardedDataParallel(net, make(net), **options)
    net = small_net()
    optimizer = sgd(net.parameters())
    ShardedDataParallel(net, optimizer)
    with pytest.raises(ValueError, match="belongs to another ShardedDataParallel already"):
        ShardedDataParallel(net, optimizer)
    net = small_net()
    optimizer = sgd(net.parameters())
    with pytest.raises(ValueError, match="wrap once"), pytest.warns(UserWarning, match="already wrapped"):
        ShardedDataParallel(torchddp.DistributedDataParallel(net), optimizer)
    net = Words()
    with pytest.raises(RuntimeError, match=r"'words.weight' has sparse gradients.*sparse=False"):
        ShardedDataParallel(net, sgd(net.parameters()))


def test_one_rank_alone_has_a_wrong_optimizer():
    def work(rank):
        net, other = small_net(), small_net()
        ShardedDataParallel(net, sgd((other if rank == 1 else net).parameters()))

    errors = [outcome.error for outcome in run_outcomes(work, 2)]
    assert "ValueError: optimizer 0 holds" in errors[1]
    assert "ShardedDataParallel failed on other ranks" in errors[0] and "optimizer 0 holds" in errors[0]


@on_ranks(2)
def test_modes_that_reduce_to_all_ranks():
    net = small_net()
    model = ShardedDataParallel(net, sgd(net.parameters()))
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
    assert torch.equal(copy.deepcopy(model.module).first.weight, model.module.first.weight)


@on_ranks(2)
def test_states_and_parameters_that_are_refused_change_nothing(rank):
    pair = make_pair(make=small_net)
    pair.train(range(3))
    state = torch.optim.AdamW(seeded(lambda: nn.Linear(3, 3)).parameters()).state_dict()
    before = str(pair.oss.local_state_dict())
    with pytest.raises(ValueError):
        pair.oss.load_state_dict(state)
    assert str(pair.oss.local_state_dict()) == before
    with pytest.raises(ValueError, match="1 of 1 new parameters"):
        pair.oss.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    pair.train_alike(range(3, 6))
    pair.oss.consolidate_state_dict(recipient_rank=0)
    if rank == 1:
        with pytest.raises(RuntimeError, match="rank 1 has no consolidated state"):
            pair.oss.state_dict()
    else:
        assert len(pair.oss.state_dict()["state"]) == len(list(pair.sharded.parameters()))
    pair.train_alike(range(6, 8))
    # A step with a graph that needs the old values.
    loss = loss_of(pair.sharded(batch_of(rank, 0)))
    loss.backward(retain_graph=True)
    pair.oss.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("where", ["backward", "step"])
@on_ranks(2, timeout=30, needed_ranks=[0])
def test_a_peer_that_dies(rank, where, transport):
    pair = make_pair(transport=transport)
    pair.train(range(2))
    if where == "backward" and rank == 1:
        os._exit(3)
    with pytest.raises(torchddp.TransportError, match="parameters" if where == "step" else ""):
        loss_of(pair.sharded(batch_of(rank, 2))).backward()
        if rank == 1:
            os._exit(3)
        assert where == "step"
        pair.oss.step()
        pair.sharded.synchronize()
