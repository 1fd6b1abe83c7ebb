"""OSS with optimizers that need whole matrices, and with a class for each group, equals the plain optimizers."""

import copy
import os
import signal
from functools import partial

import lion_pytorch
import pytest
import pytorch_optimizer
import schedulefree
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import AdamW, Muon

import torchddp
from tests.harness import assert_each_raises, each, gathered, on_ranks, run_outcomes, run_ranks
from tests.models import same_on_all_ranks, seeded
from tests.oss import weights, whole_state
from tests.sharded import batch_of
from torchddp.optim import OSS, load_checkpoint
from torchddp.sharded import cost

MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 0.01}


class Experts(nn.Module):
    """Matrices of several shapes, a stack of them, and parameters that are not for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        self.experts = nn.Parameter(torch.randn(3, 16, 16) / 4)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32)

    def forward(self, rank: int, step: int) -> torch.Tensor:
        """The loss."""
        tokens = torch.randint(32, (12,), generator=torch.Generator().manual_seed(100 * step + rank))
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        hidden = torch.einsum("bi,eij->bj", hidden, self.experts)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)), tokens.roll(1))

    def matrices(self) -> list[nn.Parameter]:
        return [self.up.weight, self.experts, self.down.weight]

    def others(self) -> list[nn.Parameter]:
        chosen = set(self.matrices())
        return [param for param in self.parameters() if param not in chosen]


def groups_of(model: Experts, optim=Muon, **options):
    return [{"params": model.matrices(), "optim": optim, **(options or MUON)}, {"params": model.others()}]


class Plain:
    """torch's Muon, on each matrix of a stack, and AdamW."""

    def __init__(self, model: Experts) -> None:
        self.model = model
        self.stack = list(model.experts.detach().unbind())
        self.muon = Muon([model.up.weight, *self.stack, model.down.weight], **MUON)
        self.adamw = AdamW(model.others(), **ADAMW)

    def step(self) -> None:
        for matrix, grad in zip(self.stack, self.model.experts.grad, strict=True):
            matrix.grad = grad
        self.muon.step()
        self.adamw.step()

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def momentum(self) -> list[torch.Tensor]:
        state = self.muon.state
        of_stack = torch.stack([state[matrix]["momentum_buffer"] for matrix in self.stack])
        return [
            state[self.model.up.weight]["momentum_buffer"],
            of_stack,
            state[self.model.down.weight]["momentum_buffer"],
        ]


def train(model, optimizer, steps, rank=None):
    for step in steps:
        model(dist.get_rank() if rank is None else rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(one, other):
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def replicated(model, optimizer, **options):
    return torchddp.DistributedDataParallel(model, **options)


WRAPPERS = [replicated, torchddp.ShardedDataParallel]


def reference_of(model, **options):
    return TorchDDP(model) if dist.get_world_size() <= 2 else torchddp.DistributedDataParallel(model, **options)


@on_ranks(1, 2, 3)
def test_muon_and_adamw_equal_two_plain_optimizers(rank):
    for wrap, options in each(WRAPPERS, [{}, {"transport": "c10d"}]):
        one, other = seeded(Experts), seeded(Experts)
        oss, plain = OSS(groups_of(one), AdamW, broadcast_buffer_size=300, **ADAMW), Plain(other)
        model, reference = wrap(one, oss, **options), reference_of(other, **options)
        train(model, oss, range(6))
        train(reference, plain, range(6))
        if options and dist.get_world_size() > 2:  # through gloo, the order of summation varies
            continue
        assert_equal(model.module, other)
        saved = whole_state(oss)
        momentum = [saved["state"][index]["momentum_buffer"] for index in range(3)]
        assert all(map(torch.equal, momentum, plain.momentum()))
        assert [group.get("optim") for group in saved["param_groups"]] == ["Muon", None]
        assert "betas" not in saved["param_groups"][0] and "momentum" not in saved["param_groups"][1]


def schedule_free(groups, **options):
    return schedulefree.AdamWScheduleFree(groups, **{"lr": 0.01, "warmup_steps": 3, **options})


PACKAGES = {
    "shampoo": partial(pytorch_optimizer.Shampoo, lr=0.01),
    "soap": partial(pytorch_optimizer.SOAP, lr=0.01, precondition_frequency=2),
    "lion": partial(lion_pytorch.Lion, lr=1e-3),
    "schedule-free": schedule_free,
}


class Small(nn.Sequential):
    def __init__(self) -> None:
        # Multiples of 16 elements, because MKL's bits depend on how a matrix is aligned.
        super().__init__(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16, bias=False))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        """The loss."""
        return super().forward(batch_of(rank, step)).square().mean()


def mixed(model: nn.Module, optim):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": matrices, "optim": optim}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


@pytest.mark.parametrize("name", PACKAGES)
@on_ranks(2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))
def test_published_optimizers_equal_one_process(rank, name):
    optim = PACKAGES[name]
    for wrap in each(WRAPPERS):
        one, other = seeded(Small), seeded(Small)
        oss = OSS(mixed(one, optim), AdamW, **ADAMW)
        matrices, vectors = mixed(other, optim)
        plain = [optim(matrices["params"]), AdamW(vectors["params"], **ADAMW)]
        model, reference = wrap(one, oss), reference_of(other)
        if name == "schedule-free":
            oss.train()
            plain[0].train()
        for step in range(8):
            train(model, oss, [step])
            reference(rank, step).backward()
            for optimizer in plain:
                optimizer.step()
                optimizer.zero_grad()
            assert_equal(model.module, other)
        if name == "schedule-free":
            oss.eval()
            plain[0].eval()
            assert_equal(model.module, other)


def made_of(name):
    """A model and an OSS over it, with Muon or a published class on its matrices."""
    if name == "muon":
        model = seeded(Experts)
        return model, OSS(groups_of(model), AdamW, **ADAMW)
    model = seeded(Small)
    return model, OSS(mixed(model, PACKAGES[name]), AdamW, **ADAMW)


def on_with(model, optimizer, name, steps):
    """Train on the same batch on every rank, whose gradients are then the same for any number of ranks."""
    if name == "schedule-free":
        optimizer.train()
    train(model, optimizer, steps, rank=0)


@pytest.mark.parametrize("name", ["muon", *PACKAGES])
def test_a_killed_run_goes_on_with_another_number_of_ranks(name, tmp_path):
    def save(rank):
        model, oss = made_of(name)
        wrapped = torchddp.DistributedDataParallel(model)
        on_with(wrapped, oss, name, range(4))
        saved = whole_state(oss)
        if rank == 0:
            torch.save({"model": model.state_dict(), "optim": saved}, tmp_path / "whole.pt")
        dcp.save({"optim": oss.local_state_dict()}, checkpoint_id=tmp_path / "shards")
        on_with(wrapped, oss, name, range(4, 6))  # lost
        if rank == 0:
            torch.save({"model": model.state_dict()}, tmp_path / "lost.pt")
        dist.barrier()
        model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None)
        on_with(wrapped, oss, name, range(6, 7))

    def resume(rank):
        for way in each(["whole", "shards"]):
            model, oss = made_of(name)
            saved = torch.load(tmp_path / "whole.pt")  # the class's name, not the class: no pickled code
            model.load_state_dict(saved["model"])
            if way == "whole":
                oss.load_state_dict(saved["optim"])
            else:
                load_checkpoint(oss, "optim", checkpoint_id=tmp_path / "shards")
            wrapped = torchddp.ShardedDataParallel(model, oss)
            on_with(wrapped, oss, name, range(4, 6))
            want = torch.load(tmp_path / "lost.pt")["model"]
            for key, value in wrapped.module.state_dict().items():
                assert torch.equal(value, want[key]), (way, key)

    survivor, killed = run_outcomes(save, 2)
    assert killed.exit_code == -signal.SIGKILL and not survivor.ok
    for ranks in (1, 4):  # whose averages of equal gradients are exact
        run_ranks(resume, ranks)


@on_ranks(3)
def test_wrong_use_is_an_error_on_every_rank(rank):
    matrix, vector = weights((4, 4), 6)

    def several(optim, *params):
        return lambda: OSS([{"params": list(params), "optim": optim}, {"params": weights(3)}])

    twice = [{"params": [matrix], "optim": Muon}, {"params": [vector, matrix]}]
    assert_each_raises(
        (several(Muon, matrix, vector), ValueError, "Muon refuses parameter 1 of group 0, of shape [6]: Muon only"),
        (lambda: OSS(weights((4, 4), 6), Muon), ValueError, "Muon refuses parameter 1 of group 0, of shape [6]"),
        (
            several(Muon, *weights((2, 3, 4, 4))),
            ValueError,
            "Muon refuses parameter 0 of group 0, of shape [2, 3, 4, 4]",
        ),
        (several(torch.optim.LBFGS, matrix), TypeError, "LBFGS uses all parameters together"),
        (several(lambda groups: torch.optim.LBFGS([matrix]), matrix), TypeError, "LBFGS uses all parameters together"),
        (several(OSS, matrix), TypeError, "'optim' of group 0 must be the class of the optimizer to shard, not OSS"),
        (several("Muon", matrix), TypeError, "'optim' of group 0 must be a subclass of torch.optim.Optimizer"),
        (several(lambda groups: None, matrix), TypeError, "must return a torch.optim.Optimizer, got NoneType"),
        (lambda: OSS(twice), ValueError, "more than one parameter group"),
        (lambda: OSS(weights(3), cost="size"), ValueError, "cost must be 'model', 'measure' or a function"),
        (
            lambda: OSS(weights(3), cost=lambda param, group: -1),
            ValueError,
            "must return a number from 0, got -1 for parameter 0 of",
        ),
        (lambda: OSS(weights(3), cost=lambda param, group: "x"), ValueError, "must return a number from 0, got 'x'"),
    )
    # A class, or costs, on one rank only.
    options = [{"params": weights((4, 4)), "optim": Muon if rank else torch.optim.SGD, "lr": 0.1}]
    assert_each_raises((lambda: OSS(options), ValueError, "'optim' of group 0 is SGD on rank 0, Muon on rank 1, 2"))
    own = "model" if rank else "measure"
    assert_each_raises(
        (lambda: OSS(weights(3), cost=own), ValueError, "cost is 'measure' on rank 0, 'model' on rank 1, 2"),
        (
            lambda: OSS(weights(3), cost=lambda *_: 1 + rank),
            RuntimeError,
            "parameter 0 of group 0, of cost 2, on rank 0",
        ),
    )

    # An added group with an error leaves everything as it was.
    oss = OSS([matrix], Muon, lr=0.1)
    before = copy.deepcopy(oss.balance())
    assert_each_raises((lambda: oss.add_param_group({"params": [vector]}), ValueError, "Muon refuses parameter 0"))
    assert oss.balance() == before and len(oss.param_groups) == 1 and list(oss.param_to_rank) == [matrix]
    # State of another class.
    model = seeded(Experts)
    state = OSS(groups_of(model), AdamW).local_state_dict()
    other = OSS(groups_of(model, torch.optim.SGD, lr=0.1), AdamW)
    text = "its parameter group 0 was stepped by Muon, not by SGD"
    assert_each_raises((lambda: other.load_state_dict(state), ValueError, text))


@on_ranks(2)
def test_groups_that_are_added_frozen_scheduled_clipped_and_scaled(rank):
    one, other = seeded(Experts), seeded(Experts)
    plain = Plain(other)
    # A class for a group that is added to an OSS with one class.
    oss = OSS(one.others(), AdamW, **ADAMW)
    oss.add_param_group({"params": one.matrices(), "optim": lambda groups, **more: Muon(groups, **more), **MUON})
    model = torchddp.ShardedDataParallel(one, oss)
    reference = TorchDDP(other)
    both = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in (oss, plain.muon, plain.adamw)]
    for step in range(3):
        for wrapped, parameters in ((model, None), (reference, other.parameters())):
            wrapped(rank, step).backward()
            if parameters is not None:
                torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        oss.clip_grad_norm(0.1)
        for optimizer in (oss, plain):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in both:
            scheduler.step()
        assert oss.param_groups[1]["lr"] == plain.muon.param_groups[0]["lr"]
    # Ranks add the squares of their shares, so the norm is rounded otherwise.
    torch.testing.assert_close(list(model.module.parameters()), list(other.parameters()), rtol=1e-3, atol=1e-4)

    owners = dict(oss.param_to_rank)
    one.up.weight.requires_grad_(False)
    model.refresh_trainable()
    before = one.up.weight.detach().clone()
    train(model, oss, range(3, 5))
    assert torch.equal(one.up.weight, before)
    one.up.weight.requires_grad_(True)
    model.refresh_trainable()
    assert dict(oss.param_to_rank) == owners
    train(model, oss, range(5, 6))
    assert not torch.equal(one.up.weight, before)

    scaler = torchddp.optim.ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(model(rank, 6)).backward()
    before = one.down.weight.detach().clone()
    scaler.step(oss)
    assert not torch.equal(one.down.weight, before)


@on_ranks(2)
def test_a_closure_and_a_plain_state_dict(rank):
    one = seeded(Experts)
    oss = OSS(groups_of(one), AdamW, **ADAMW)
    calls = []

    def closure():
        calls.append(1)
        loss = one(0, 0)
        loss.backward()
        return loss

    assert oss.step(closure) > 0 and calls == [1]
    # The state of a plain Muon, which has no name of its class.
    matrices = weights((4, 8), (8, 4))
    plain = Muon([p.clone().requires_grad_() for p in map(torch.Tensor.detach, matrices)], **MUON)
    for param in plain.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    plain.step()
    loaded = OSS([{"params": matrices, "optim": Muon, **MUON}])
    loaded.load_state_dict(plain.state_dict())
    (mine,) = loaded.state.values()
    assert torch.equal(mine["momentum_buffer"], torch.full_like(mine["momentum_buffer"], 0.05))


@on_ranks(2)
def test_an_added_class_may_write_into_its_group(rank):
    # Only one rank has a parameter of the group, in which the class counts its steps.
    oss = OSS(weights((9, 9)), Muon, lr=0.1)
    params = weights(4)
    oss.add_param_group({"params": params, "optim": schedule_free})
    oss.train()
    for count in range(1, 4):
        params[0].grad = torch.ones(4)
        oss.step()
        assert oss.param_groups[1]["k"] == count
    oss.eval()
    assert same_on_all_ranks(params)


@on_ranks(2)
def test_owners_are_balanced_by_cost_over_all_groups_and_optimizers(rank):
    # By elements, the wide matrix and the embedding would be alone on one rank each.
    square, wide, embedding = weights((48, 48), (4, 600), (300, 8))
    oss = OSS([{"params": [square, wide], "optim": Muon}, {"params": [embedding]}], AdamW)
    shares = oss.balance()
    assert oss.param_to_rank[wide] == oss.param_to_rank[embedding] != oss.param_to_rank[square]
    assert [share.rank for share in shares] == [0, 1] and sum(share.elements for share in shares) == 7104
    assert {share.cost for share in shares} == {5 * 3 * 48**3, 5 * (2 * 16 * 600 + 64) + 2400}
    assert gathered(shares) == [shares, shares]

    # Several optimizers of one module: together.
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    one, other = (OSS(layer.parameters(), Muon) for layer in model)
    assert {*one.param_to_rank.values(), *other.param_to_rank.values()} == {0}
    wrapped = torchddp.ShardedDataParallel(model, [one, other])
    assert sorted([*one.param_to_rank.values(), *other.param_to_rank.values()]) == [0, 1]
    start = [p.detach().clone() for p in model.parameters()]
    wrapped(torch.ones(2, 32)).sum().backward()
    for optimizer in (one, other):
        optimizer.step()
    assert not any(map(torch.equal, start, model.parameters()))
    assert len(one.state) + len(other.state) == 1

    # One's own costs.
    small, large = weights(2, 900)
    own = OSS([small, large], cost=lambda param, group: 1e6 if len(param) == 2 else 1)
    assert own.balance()[0].cost == 1e6 and own.param_to_rank[small] == 0


@on_ranks(2)
def test_costs_are_measured_once_for_each_shape_by_one_rank(rank, monkeypatch):
    timed = []
    measure = cost.milliseconds

    def watched(factory, kind, group, param):
        timed.append((kind.__name__, tuple(param.shape)))
        assert measure(factory, kind, group, param) > 0
        return float(param.numel())  # on a busy machine a small parameter can take longer than a large one

    monkeypatch.setattr(cost, "milliseconds", watched)
    params = weights((40, 40), (40, 40), (8, 8), 5)
    before = torch.get_rng_state()
    oss = OSS([{"params": params[:3], "optim": Muon}, {"params": params[3:]}], AdamW, cost="measure")
    assert torch.equal(torch.get_rng_state(), before)
    shapes = [("Muon", (40, 40)), ("Muon", (8, 8)), ("AdamW", (5,))]
    by_rank = gathered(timed)
    assert sorted(by_rank[0] + by_rank[1]) == sorted(shapes) and by_rank[0] and by_rank[1]
    shares = gathered(oss.balance())
    assert shares[0] == shares[1] and all(share.cost > 0 for share in shares[0])
    assert oss.param_to_rank[params[0]] != oss.param_to_rank[params[1]]
    timed.clear()
    oss.add_param_group({"params": weights((8, 8), (3, 3, 3)), "optim": Muon})
    assert sorted(sum(gathered(timed), [])) == [("Muon", (3, 3, 3))]
    oss.refresh_trainable()


@on_ranks(2)
def test_parameters_travel_while_the_next_are_updated(rank, monkeypatch):
    events = []
    broadcast = dist.broadcast

    def sent(tensor, *args, group_src, **more):
        events.append(f"send {group_src}")
        return broadcast(tensor, *args, group_src=group_src, **more)

    params = weights(*[(8, 8)] * 4)
    oss = OSS(params, Muon, broadcast_buffer_size=64)
    for param in params:
        param.grad = torch.eye(8)
    step = oss.optim.step
    oss.optim.step = lambda: (events.append("update"), step())
    monkeypatch.setattr(dist, "broadcast", sent)
    oss.step()
    # In rounds: the first of each owner, then the second. The last update is of what is in no message: nothing.
    first, second = ["send 0", "send 1"], ["update", "send 0", "send 1"]
    assert events == ["update", *first, *second, "update"] if rank == 0 else [*first, *first]
    # A class that may count its steps is stepped once, and then everything is sent.
    events.clear()
    oss = OSS(params, partial(lion_pytorch.Lion, lr=0.1), broadcast_buffer_size=64)
    step = oss.optim.step
    oss.optim.step = lambda: (events.append("update"), step())
    oss.step()
    assert events == ["update", *["send 0", "send 1"] * 2]
