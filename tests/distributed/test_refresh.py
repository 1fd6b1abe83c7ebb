"""refresh_trainable(): after any change of parameters, training continues as with a new wrapper; its errors."""

import copy
import random
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.distributed.test_refresh_modes import DDP, Hook, float_step, grow, names_of, train
from tests.harness import each, on_ranks
from tests.models import Mlp, batch, loss_of, reordered, same_on_all_ranks, seeded
from tests.oss import float_mlp as mlp

WIDTH = 6
OPTIMIZERS = [partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.05, momentum=0.9)]
KINDS = [torchddp.DistributedDataParallel, torchddp.replicate]


class Tower(nn.Module):
    """A sequence of layers of different sizes, some with batch norm, which can grow."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(make_layer(number) for number in range(3))
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make_layer(number):
    inner = 4 + 3 * number
    norm = [nn.BatchNorm1d(inner, dtype=torch.float64)] if number % 2 else []
    return nn.Sequential(
        nn.Linear(WIDTH, inner, dtype=torch.float64), *norm, nn.Tanh(), nn.Linear(inner, WIDTH, dtype=torch.float64)
    )


class Side:
    """A model in training, which is refreshed after a change, or wrapped again (`is_wrapped_anew`)."""

    def __init__(self, make, module, make_optimizer, is_told, is_wrapped_anew=False):
        self.make, self.module = make, module
        self.is_told, self.is_wrapped_anew = is_told, is_wrapped_anew  # is_told: of changes, at once
        self.model = make(module)
        self.optimizer = make_optimizer(module.parameters())

    def changed(self):
        if not self.is_wrapped_anew:
            if self.is_told:
                self.model.refresh_trainable()
            return
        self.model = None  # frees its hooks too
        if isinstance(self.module, torchddp.composable.ReplicateModule):
            torchddp.composable.unreplicate(self.module)
        self.model = self.make(self.module)

    def backward(self, rank, number):
        self.model(batch(rank, number, 5, WIDTH)).square().mean().backward()

    def act(self, action, which, rank, number):
        parts = [*self.module.layers, self.module.head]
        part = parts[which % len(parts)]
        if action in ("accumulate", "step of two"):
            with self.model.no_sync():
                self.backward(rank, number)
        if action in ("step", "step of two", "kept"):
            self.backward(rank, number + 1)
            self.optimizer.step()
            if action != "kept":
                self.optimizer.zero_grad()
        if action == "thaw":
            part.requires_grad_(True)
            self.changed()
        elif action == "freeze":
            if any(p.requires_grad for other in parts if other is not part for p in other.parameters()):
                part.requires_grad_(False)
                for parameter in part.parameters():
                    parameter.grad = None  # its accumulated gradient would be local
            self.changed()
        elif action == "add":
            # Different values on each rank, if they are broadcast before use.
            torch.manual_seed(100 * number + rank * self.is_told)
            layer = make_layer(len(self.module.layers))
            self.module.layers.append(layer)
            self.changed()
            self.optimizer.add_param_group({"params": list(layer.parameters())})

    def values(self, buffers):
        """All values: parameters, gradients, optimizer state, and optionally buffers."""
        held = {n: (p, p.grad, dict(self.optimizer.state[p])) for n, p in self.module.named_parameters()}
        return held | dict(self.module.named_buffers() if buffers else ())


def play(rank, make, fresh=None, *, seeds, is_told=True, buffers=True):
    """Do the same to both sides, which must stay bitwise equal; buffers are equal after a forward."""

    def assert_equal(buffers):
        ours, anew = (side.values(buffers) for side in sides)
        torch.testing.assert_close(ours, anew, rtol=0, atol=0)

    changes = 0
    for seed in seeds:
        draw, module = random.Random(seed), seeded(Tower)
        sides = [
            Side(make, module, OPTIMIZERS[seed % 2], is_told),
            Side(fresh or make, copy.deepcopy(module), OPTIMIZERS[seed % 2], is_told, is_wrapped_anew=True),
        ]
        for number in range(13):
            action = draw.choice(("freeze", "thaw", "add", "accumulate", "step", "step", "step of two", "kept"))
            which, is_change = draw.randrange(100), action in ("freeze", "thaw", "add")
            changes += is_change
            for side in sides:
                side.act(action, which, rank, 10 * number)
            assert_equal(buffers and not is_change)
        for side in sides:
            side.act("step", 0, rank, 1000)
        assert_equal(buffers)
        assert same_on_all_ranks([torch.cat([p.detach().reshape(-1) for p in module.parameters()])])
    assert changes > 2 * len(seeds)


@pytest.mark.parametrize(
    ("kind", "transport", "world_size"),
    [(KINDS[0], "c10d", 1), (KINDS[0], "shm", 2), (KINDS[0], "c10d", 3), (KINDS[1], "shm", 3)],
)
@on_ranks()
def test_random_schedules_equal_wrapping_again(rank, world_size, kind, transport):
    """In torch's class up to two ranks, whose sums have one order."""
    first, schedules = 10 * world_size, 4 if kind is torchddp.DistributedDataParallel else 2
    fresh = TorchDDP if world_size <= 2 else None
    play(rank, partial(kind, transport=transport), fresh, seeds=range(first, first + schedules))


@pytest.mark.parametrize(
    ("kind", "transport", "world_size"), [(KINDS[0], "c10d", 3), (KINDS[0], "shm", 2), (KINDS[1], "shm", 2)]
)
@on_ranks()
def test_noticed_in_forward(rank, kind, transport):
    automatic, fresh = (partial(kind, transport=transport, **more) for more in ({"auto_refresh_trainable": True}, {}))
    play(rank, automatic, fresh, seeds=range(4), is_told=False, buffers=False)


@on_ranks(2)
def test_messages(rank):
    # An error in forward names the remedy.
    model = DDP(seeded(mlp))
    train(model, rank)
    model.module.first.requires_grad_(False)
    float_step(model, rank)
    with pytest.raises(RuntimeError, match=r"no longer require grad: first\.weight.*refresh_trainable\(\) on all"):
        model(batch(rank).float())

    # It is no cause of an error of the transport.
    model = DDP(seeded(mlp), find_unused_parameters=True)
    float_step(model, rank)
    model.module.first.requires_grad_(False)
    model.interrupt("a reason")
    with pytest.raises(torchddp.TransportError, match="^a reason"):
        model(batch(rank).float())

    # Thawed and added parameters are named.
    for kind in each(KINDS):
        module = seeded(mlp)
        module.first.requires_grad_(False)
        model = kind(module)
        optimizer = torch.optim.SGD(module.last.parameters(), lr=0.1)
        train(model, rank, optimizer=optimizer)
        module.first.requires_grad_(True)
        grow(module)
        with pytest.warns(UserWarning, match=r"first\.weight, .*extra\.bias were thawed or added.*refresh_trainable"):
            train(model, rank, steps=64, optimizer=optimizer)
        model.refresh_trainable()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            train(model, rank, steps=65, optimizer=optimizer)


train_twice = partial(train, steps=2, dtype=torch.float64)


def error_of(call):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call()
    return str(caught.value)


def told(name, others, last):
    return f"'{name}' is {others} on rank {{others}}, {last} on rank {{last}}"


FIRST, LAST, EXTRA = "(float64[16, 8])", "(float64[8, 24])", "(float64[2, 3])"
DIFFERENCES = [
    (lambda m: m.first.weight.requires_grad_(False), told("first.weight", f"trained {FIRST}", f"frozen {FIRST}")),
    (lambda m: setattr(m, "extra", nn.Linear(3, 2).double()), told("extra.weight", "missing", f"trained {EXTRA}, new")),
    (lambda m: setattr(m.first, "bias", None), told("first.bias", "trained (float64[16])", "missing")),
    (lambda m: m.requires_grad_(False), told("last.weight", f"trained {LAST}", f"frozen {LAST}")),
    (
        lambda m: setattr(m.last, "weight", nn.Parameter(m.last.weight.detach().clone())),
        told("last.weight", f"trained {LAST}", f"trained {LAST}, new"),
    ),
    (reordered, "rank {last} has its parameters in a different order from rank 0"),
]


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize(("transport", "world_size"), [("shm", 2), ("c10d", 3)])
@on_ranks()
def test_ranks_that_disagree_all_raise(rank, world_size, transport, auto):
    for kind, (change, words) in each(KINDS, DIFFERENCES):
        if auto and change is reordered and world_size > 2:
            continue
        module = seeded(Mlp)
        model = kind(module, transport=transport, auto_refresh_trainable=auto)
        train_twice(model, rank)
        reducer = getattr(model, "reducer", None)
        kept = [(held, dict(held)) for part in module.modules() for held in (part._modules, part._parameters)]
        if rank == world_size - 1:
            change(module)
        text = error_of(partial(model, batch(rank)) if auto else model.refresh_trainable)
        others = ", ".join(map(str, range(world_size - 1)))
        assert words.format(others=others, last=world_size - 1) in text, text
        assert f"on rank {rank}: the model is not the same on all ranks" in text
        assert reducer is getattr(model, "reducer", None)
        # Once repaired, here by undoing the change, training continues.
        for held, before in kept:
            held.clear()
            held.update(before)
        module.requires_grad_(True)
        if not auto:
            model.refresh_trainable()
        train_twice(model, rank)


@on_ranks(2)
def test_nothing_to_train_join_and_models_that_can_not_be_refreshed(rank):
    # Nothing to train and thawed later.
    for kind, auto in each(KINDS, [False, True]):
        module = seeded(Mlp)
        model = kind(module, auto_refresh_trainable=auto)
        refresh = (lambda: None) if auto else model.refresh_trainable
        train_twice(model, rank)
        module.requires_grad_(False)
        for _ in range(2):
            text = error_of(partial(model, batch(rank)) if auto else model.refresh_trainable)
            assert f"rank {rank}" in text and "no parameter of the module requires grad" in text
        module.last.requires_grad_(True)
        refresh()
        before = module.first.weight.clone()
        train_twice(model, rank)
        module.requires_grad_(True)
        refresh()
        assert torch.equal(module.first.weight, before)
        train_twice(model, rank)
        assert not torch.equal(module.first.weight, before)

    # Not inside join(), but after it.
    module = seeded(Mlp)
    model = DDP(module, auto_refresh_trainable=True)
    for epoch in range(3):
        with model.join():
            for step in range(2 + rank):
                loss_of(model(batch(rank, step))).backward()
                if epoch == 0 and step < 2:
                    assert "join() context" in error_of(model.refresh_trainable)
        module.first.requires_grad_(epoch == 1)
        model.refresh_trainable()
        assert ("first.weight" in names_of(model)) == (epoch == 1)

    # What can't be refreshed.
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        python = DDP(seeded(Mlp))
    assert "python_reducer" in error_of(python.refresh_trainable)
    model = DDP(seeded(Mlp))
    model.module.extra = nn.Linear(2, 2, device="meta")
    assert "extra.weight, extra.bias were without values" in error_of(model.refresh_trainable)
    model.module.extra = nn.LazyLinear(2)
    assert "without values" in error_of(model.refresh_trainable)
    with pytest.raises(TypeError, match="auto_refresh_trainable must be True or False, got 'yes'"):
        DDP(seeded(Mlp), auto_refresh_trainable="yes")

    # What a hook refuses changes nothing, in the hook either: with other parameters it keeps its residuals.
    module = seeded(mlp)
    low_rank, hooks = torchddp.comm_hooks.PowerSGD(2, min_compression_rate=0.1), torchddp.comm_hooks
    model = DDP(module, comm_hook=hooks.PerParameter(hooks.Int8(), [("*.weight", low_rank)]))

    def step():
        float_step(model, rank)
        assert same_on_all_ranks([p.grad for p in module.parameters()])

    step()
    for extra, error, match in (
        (nn.Linear(2, 2, dtype=torch.float64), TypeError, r"'extra\.weight' is torch\.float64"),
        (nn.Linear(2, 1), ValueError, r"'extra\.weight' of shape \(1, 2\)"),
    ):
        module.extra = extra
        module.first.requires_grad_(False)
        with pytest.raises(error, match=match):
            model.refresh_trainable()
        module.first.requires_grad_(True)
        del module.extra
        step()
    module.first.bias.requires_grad_(False)
    model.refresh_trainable()
    step()

    # If a hook of one's own refuses, the model raises in forward until a refresh succeeds.
    class Refusing(Hook):
        def follow_parameters(self, model):
            super().follow_parameters(model)
            if self.followed == 1:
                raise ValueError("other parameters")

    model = DDP(seeded(mlp), comm_hook=Refusing())
    with pytest.raises(ValueError, match="other parameters"):
        model.refresh_trainable()
    assert "refresh_trainable() failed halfway" in error_of(lambda: model(batch(rank).float()))
    model.refresh_trainable()
    float_step(model, rank)

    # A rank with an incomplete backward makes all ranks raise.
    module = seeded(Mlp)
    model = DDP(module, bucket_cap_mb=100)
    train_twice(model, rank)
    if rank == 1:  # a graph without the first layer: its gradients never come
        hidden = model(batch(rank))
        module.last.weight.grad = None
        torch.autograd.backward(hidden.sum(), inputs=[module.last.weight])
    text = error_of(model.refresh_trainable)
    assert "refresh_trainable() failed on other ranks" in text if rank == 0 else "first.weight" in text
    assert rank == 1 or "rank 1: RuntimeError" in text
