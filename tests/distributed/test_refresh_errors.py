"""refresh_trainable() that can't be done: an error on every rank, nothing changed, and a way on."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import torchddp
from tests.harness import each, on_ranks
from tests.models import Mlp, batch, loss_of, same_on_all_ranks, seeded

pytestmark = pytest.mark.beyond_torch("has no refresh_trainable()")

KINDS = [torchddp.DistributedDataParallel, torchddp.replicate]


def train(model, rank):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()
    assert same_on_all_ranks(parameters)


def error_of(call):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call()
    return str(caught.value)


def freeze(module):
    module.first.weight.requires_grad_(False)


def add(module):
    module.extra = nn.Linear(3, 2, dtype=torch.float64)


def remove(module):
    module.first.bias = None


def replace(module):
    module.last.weight = nn.Parameter(module.last.weight.detach().clone())


def freeze_all(module):
    module.requires_grad_(False)


def reorder(module):
    module._modules["first"] = module._modules.pop("first")


DIFFERENCES = {
    freeze: "'first.weight' is trained (float64[16, 8]) on rank {others}, frozen (float64[16, 8]) on rank {last}",
    add: "'extra.weight' is missing on rank {others}, trained (float64[2, 3]), new on rank {last}",
    remove: "'first.bias' is trained (float64[16]) on rank {others}, missing on rank {last}",
    replace: "'last.weight' is trained (float64[8, 24]) on rank {others}, trained (float64[8, 24]), new on rank {last}",
    freeze_all: "'last.weight' is trained (float64[8, 24]) on rank {others}, frozen (float64[8, 24]) on rank {last}",
    reorder: "rank {last} has its parameters in another order than rank 0",
}


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize(("transport", "world_size"), [("shm", 2), ("c10d", 3)])
@on_ranks()
def test_ranks_that_disagree_all_hear_of_it(rank, world_size, transport, auto):
    for kind, (change, words) in each(KINDS, DIFFERENCES.items()):
        if auto and change is reorder and world_size > 2:
            continue
        module = seeded(Mlp)
        model = kind(module, transport=transport, auto_refresh_trainable=auto)
        train(model, rank)
        reducer = getattr(model, "reducer", None)
        kept = copy.copy(module._modules), dict(module.first._parameters), module.last.weight
        if rank == world_size - 1:
            change(module)
        text = error_of(partial(model, batch(rank)) if auto else model.refresh_trainable)
        others = ", ".join(map(str, range(world_size - 1)))
        assert words.format(others=others, last=world_size - 1) in text, text
        assert f"on rank {rank}: the model is not the same on all ranks" in text
        assert reducer is getattr(model, "reducer", None)
        # Put right, it goes on: here by what it was.
        module._modules.clear()
        module._modules.update(kept[0])
        module.first._parameters.update(kept[1])
        module.last._parameters["weight"] = kept[2]
        module.requires_grad_(True)
        if not auto:
            model.refresh_trainable()
        train(model, rank)


@on_ranks(2)
def test_nothing_to_train_join_and_what_can_not_be_refreshed(rank):
    # Nothing to train and thawed later.
    for kind, auto in each(KINDS, [False, True]):
        module = seeded(Mlp)
        model = kind(module, auto_refresh_trainable=auto)
        refresh = (lambda: None) if auto else model.refresh_trainable
        train(model, rank)
        module.requires_grad_(False)
        for _ in range(2):
            text = error_of(partial(model, batch(rank)) if auto else model.refresh_trainable)
            assert f"rank {rank}" in text and "no parameter of the module requires grad" in text
        module.last.requires_grad_(True)
        refresh()
        before = module.first.weight.clone()
        train(model, rank)
        module.requires_grad_(True)
        refresh()
        assert torch.equal(module.first.weight, before)
        train(model, rank)
        assert not torch.equal(module.first.weight, before)

    # Not inside of join but after it.
    module = seeded(Mlp)
    model = torchddp.DistributedDataParallel(module, auto_refresh_trainable=True)
    for epoch in range(3):
        with model.join():
            for step in range(2 + rank):
                loss_of(model(batch(rank, step))).backward()
                if epoch == 0 and step < 2:
                    assert "join() context" in error_of(model.refresh_trainable)
        module.first.requires_grad_(epoch == 1)
        model.refresh_trainable()
        assert ("first.weight" in [spec.name for spec in model.session.specs]) == (epoch == 1)

    # What can not be refreshed.
    module = seeded(Mlp)
    module.last.requires_grad_(False)
    late = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    delayed = torchddp.DistributedDataParallel(
        module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module.first.weight
    )
    assert "delay_all_reduce_named_params" in error_of(delayed.refresh_trainable)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        python = torchddp.DistributedDataParallel(seeded(Mlp))
    assert "python_reducer" in error_of(python.refresh_trainable)
    model = torchddp.DistributedDataParallel(seeded(Mlp))
    model.module.extra = nn.Linear(2, 2, device="meta")
    assert "extra.weight, extra.bias were without values" in error_of(model.refresh_trainable)
    model.module.extra = nn.LazyLinear(2)
    assert "without values" in error_of(model.refresh_trainable)
    with pytest.raises(TypeError, match="auto_refresh_trainable must be True or False, got 'yes'"):
        torchddp.DistributedDataParallel(seeded(Mlp), auto_refresh_trainable="yes")

    # The model reduces nothing until it is refreshed with success: and says so.
    module = seeded(lambda: Mlp(dtype=torch.float32))
    model = torchddp.DistributedDataParallel(module, comm_hook=torchddp.comm_hooks.PowerSGD(4))

    def step():
        loss_of(model(batch(rank).float())).backward()
        assert same_on_all_ranks([p.grad for p in module.parameters()])

    step()
    module.extra = nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"'extra\.weight' is torch\.float64"):
        model.refresh_trainable()
    assert "refresh_trainable() has failed" in error_of(lambda: model(batch(rank).float()))
    del module.extra
    model.refresh_trainable()
    step()


@on_ranks(2)
def test_a_rank_whose_backward_is_not_complete_tells_the_others(rank):
    module = seeded(Mlp)
    model = torchddp.DistributedDataParallel(module, bucket_cap_mb=100)
    train(model, rank)
    if rank == 1:  # a graph without the first layer: its gradients never come
        hidden = model(batch(rank))
        module.last.weight.grad = None
        torch.autograd.backward(hidden.sum(), inputs=[module.last.weight])
    text = error_of(model.refresh_trainable)
    assert "refresh_trainable() failed on other ranks" in text if rank == 0 else "first.weight" in text
    assert rank == 1 or "rank 1: RuntimeError" in text
