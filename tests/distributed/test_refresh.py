"""refresh_trainable(): after any change of parameters, training continues as with a new wrapper.

Random schedules of freezing, thawing, adding and accumulating, on a refreshed model and on one that is wrapped again.
"""

import copy
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import each, on_ranks
from tests.models import batch, same_on_all_ranks, seeded
from tests.pages import run_code
from torchddp import Checks

WIDTH = 6
OPTIMIZERS = [partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.05, momentum=0.9)]
KINDS = [torchddp.DistributedDataParallel, torchddp.replicate]
UNUSED = {"find_unused_parameters": True}


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("transport", "world_size"), [("c10d", 1), ("shm", 2), ("c10d", 3), ("shm", 4)])
@on_ranks()
def test_random_schedules_equal_wrapping_again(rank, world_size, kind, transport):
    """In torch's class up to two ranks, whose sums have one order."""
    first, schedules = 10 * world_size, 4 if kind is torchddp.DistributedDataParallel else 2
    fresh = TorchDDP if world_size <= 2 else None
    play(rank, partial(kind, transport=transport), fresh, seeds=range(first, first + schedules))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_options_are_kept(rank, kind):
    plain = [{"static_graph": True}, {"bucket_cap_mb": 0.0005}, {"bucket_cap_mb": "auto"}, UNUSED]
    plain += [{"forward_sync_buffers": False}, {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": False}]
    together = {"checks": Checks(gradient_stats=True, nonfinite=True, parameters_every=1)}
    for options in each([*plain, together, {"skip_all_reduce_unused_params": True, **UNUSED}]):
        own_buffers = "forward_sync_buffers" in options  # which a new wrapper sends once
        play(rank, partial(kind, **options), seeds=[20], buffers=not own_buffers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("transport", "world_size"), [("c10d", 1), ("shm", 2), ("c10d", 3)])
@on_ranks()
def test_noticed_in_forward(rank, kind, transport):
    automatic, fresh = (partial(kind, transport=transport, **more) for more in ({"auto_refresh_trainable": True}, {}))
    play(rank, automatic, fresh, seeds=range(4), is_told=False, buffers=False)


@on_ranks(1, 2)
def test_the_example(rank):
    before = torchddp.finished_steps()
    torch.manual_seed(rank)
    names = run_code("freeze_and_thaw.md")
    assert torchddp.finished_steps() - before == 30
    module, optimizer = names["module"], names["optimizer"]
    assert same_on_all_ranks(list(module.parameters()))
    assert [int(optimizer.state[module[place].weight]["step"]) for place in (0, 2, 3)] == [20, 30, 10]
