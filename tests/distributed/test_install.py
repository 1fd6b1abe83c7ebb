"""torchddp.install() on two ranks: any code that wraps a model gets our class, with torch's weights.

Also the count of steps, which proves that our reducer ran.
"""

import copy
import pickle

import pytest
import torch
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import torchddp
from tests import framework
from tests.harness import on_ranks, through_a_file
from tests.models import Mlp, seeded, step_on


def net(dtype=torch.float64):
    return seeded(lambda: Mlp(dtype=dtype))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WAYS = {
    "attribute": lambda module: torch.nn.parallel.DistributedDataParallel(module),
    "other attribute": lambda module: torch.nn.parallel.distributed.DistributedDataParallel(module),
    "name": lambda module: framework.DDP(module),
    "default argument": lambda module: framework.wrap(module),
    "dict": lambda module: framework.CLASSES["ddp"](module),
    "partial": lambda module: framework.make(module),
    "torch's arguments": lambda module: framework.wrap(
        module, device_ids=None, bucket_cap_mb=25, gradient_as_bucket_view=False, check_reduction=True
    ),
}


@on_ranks(2)
def test_every_reference_to_the_class_makes_ours_with_torchs_weights(rank):
    expected = framework.train(TorchDDP(net()), rank)
    for name, wrap in WAYS.items():
        before = torchddp.finished_steps()
        with torchddp.install():
            model = wrap(net())
            assert type(model) is torchddp.DDP, name
            assert same(framework.train(model, rank), expected), name
        assert torchddp.finished_steps() == before + 3, name
        assert type(wrap(net())) is TorchDDP, name


@on_ranks(2)
def test_models_of_both_classes_continue_across_the_switch(rank):
    torchs = TorchDDP(net())
    first = framework.train(torchs, rank)
    with torchddp.install():
        assert isinstance(torchs, framework.DDP) and type(torchs) is TorchDDP
        ours = framework.wrap(net())
        for made in (copy.deepcopy(torchs), pickle.loads(pickle.dumps(torchs))):
            assert type(made) is TorchDDP  # a copy has the class of the original
        loaded = through_a_file(ours, weights_only=False)
    assert isinstance(ours, TorchDDP) and same(framework.train(ours, rank), first)
    assert type(loaded) is torchddp.DDP and same(framework.train(loaded, rank), first)


@on_ranks(2)
def test_defaults_reach_the_class_and_explicit_arguments_win(rank):
    with torchddp.install(transport="c10d", comm_hook="bf16"):
        for _ in range(2):  # each model has its own hook
            model = framework.wrap(net(torch.float32))
            assert model.session.options.transport == "c10d" and len(model._comm_hooks) == 1
        model = framework.wrap(net(), transport="shm", comm_hook=None)
        assert model.session.options.transport == "shm" and not model._comm_hooks

        class Derived(TorchDDP):
            pass

        assert Derived(net(torch.float32)).session.options.transport == "c10d"

    with torchddp.install(gradient_as_bucket_view=True, bucket_cap_mb=3, device_ids=None, dim=0):
        model, by_place = framework.wrap(net()), torch.nn.parallel.DistributedDataParallel(net(), None, None, 0)
        assert model.session.options.gradient_as_bucket_view and by_place.session.options.gradient_as_bucket_view
        assert model.bucket_bytes_cap == 3 * 2**20
        assert framework.wrap(net(), bucket_cap_mb=7).bucket_bytes_cap == 7 * 2**20
        assert not framework.wrap(net(), gradient_as_bucket_view=False).session.options.gradient_as_bucket_view


@on_ranks(2)
def test_classes_derived_from_torchs(rank):
    expected = framework.train(TorchDDP(net()), rank)
    with torchddp.install():

        class Meanwhile(TorchDDP):
            def __init__(self, module, answer):
                super().__init__(module)
                self.answer = answer

        class ByName(TorchDDP):
            def __init__(self, module):
                TorchDDP.__init__(self, module)

        with pytest.raises(TypeError, match=r"ByName was derived.*call super\(\).__init__"):
            ByName(net())
    before = torchddp.finished_steps()
    model = Meanwhile(net(), 42)
    assert model.answer == 42 and isinstance(model, torchddp.DDP)
    assert same(framework.train(model, rank), expected) and torchddp.finished_steps() == before + 3


@on_ranks(2)
def test_torchs_own_uses_of_its_class(rank):
    def train_replicated():
        module = replicate(net())
        for _ in range(2):
            module(torch.full((3, 8), float(rank + 1), dtype=torch.float64)).sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    expected = train_replicated()
    before = torchddp.finished_steps()
    with torchddp.install():
        assert same(train_replicated(), expected)
    assert torchddp.finished_steps() == before + 2


@on_ranks(1, 2)
def test_each_synchronized_backward_of_ours_counts(rank):
    before = torchddp.finished_steps()
    ddp = torchddp.DDP(net())
    for step in range(3):
        step_on(ddp, rank, step)
    with ddp.no_sync():
        step_on(ddp, rank, 3)
    del ddp  # steps of freed models count too
    step_on(net(), rank)
    step_on(TorchDDP(net()), rank)
    assert torchddp.finished_steps() - before == 3
