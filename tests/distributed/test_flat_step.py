"""Flat steps of small parameters: bitwise equal to steps per tensor, with fewer tensors."""

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import each, gathered, on_ranks
from tests.models import Branches, batch, seeded
from tests.oss import assert_same_state, whole_state
from torchddp.optim import OSS
from torchddp.sharded import flat_step

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.005}),
    (torch.optim.SGD, {"lr": 0.002, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.003, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.003}),
    (torch.optim.AdamW, {"lr": 0.003, "foreach": True}),
    (torch.optim.Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.003, "momentum": 0.9, "centered": True}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Adamax, {"lr": 0.003}),
    (torch.optim.NAdam, {"lr": 0.003}),
    (torch.optim.RAdam, {"lr": 0.003}),
    (torch.optim.Rprop, {"lr": 0.003}),
]
IDS = [f"{optim.__name__}-{'-'.join(sorted(options.keys() - {'lr'}))}" for optim, options in OPTIMIZERS]
WIDTH, LAYERS, LARGE = 7, 20, 6  # equally many large ones on each of 1, 2 or 3 ranks


class Deep(nn.Module):
    """Forty small parameters, six large ones, two of another dtype, one of another memory layout, one scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.large = nn.ModuleList(nn.Linear(WIDTH, 10_000, bias=False) for _ in range(LARGE))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        image = x[:, None, None].expand(-1, 3, 5, -1)
        x = x + self.conv(image).mean((1, 2)) * self.scale
        for layer in self.large:
            x = x + layer(x).mean(-1, keepdim=True)
        return self.wide(x.double())


@dataclass
class Flat:
    """A model with flat steps, and the same model stepped per tensor."""

    models: list[Any]
    optimizers: list[Any]

    def backward(self, step: int) -> None:
        for model in self.models:
            model(batch(dist.get_rank(), step, 4, WIDTH, dtype=torch.float32)).square().mean().backward()

    def step(self, set_to_none: bool = True) -> list[int]:
        """Step both; return the number of tensors that each inner optimizer got."""
        counts = [step_and_count(self.optimizers[0]), step_and_count(self.optimizers[1], small_numel=0)]
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        return counts

    def train(self, steps: range) -> list[int]:
        """Train, asserting equality after each step; return the last result of `step`."""
        for step in steps:
            self.backward(step)
            counts = self.step()
            self.assert_equal()
        return counts

    def assert_equal(self) -> None:
        torch.testing.assert_close(*(dict(model.module.named_parameters()) for model in self.models), rtol=0, atol=0)
        assert_same_state(*(optimizer.local_state_dict() for optimizer in self.optimizers))


def step_and_count(optimizer: OSS, small_numel: int = flat_step.SMALL_NUMEL) -> int:
    """Take a step and count the tensors with gradients that the inner optimizer gets."""
    inner, seen = optimizer.optim, []
    plain = inner.step

    def counted() -> None:
        seen.append(sum(p.grad is not None for group in inner.param_groups for p in group["params"]))
        plain()

    with mock.patch.object(inner, "step", counted), mock.patch.object(flat_step, "SMALL_NUMEL", small_numel):
        optimizer.step()
    return seen[0]


def make_flat(optim, options, make=Deep, **more) -> Flat:
    models = [seeded(make), seeded(make)]
    optimizers = [OSS(model.parameters(), optim, **copy.deepcopy(options)) for model in models]
    wrapped = [torchddp.ShardedDataParallel(m, o, **more) for m, o in zip(models, optimizers, strict=True)]
    return Flat(wrapped, optimizers)


@pytest.mark.rest_is_thorough("*-2", "AdamW--1")
@on_ranks(1, 2, pytest.param(3, marks=pytest.mark.slow))
@pytest.mark.parametrize(("optim", "options"), OPTIMIZERS, ids=IDS)
def test_the_same_bits_with_fewer_tensors(rank, optim, options, world_size):
    pair = make_flat(optim, options)
    flat, single = pair.train(range(5))
    assert_same_state(*(whole_state(optimizer) for optimizer in pair.optimizers))
    # Large parameters, one flat run of small ones, and those of another dtype.
    assert flat <= LARGE // world_size + 2 < 12 < single if world_size > 1 else flat == single == 50


@on_ranks(2)
def test_where_steps_round_differently_or_are_per_tensor(rank):
    # Fused kernels round the last elements differently.
    for optim in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        pair = make_flat(optim, {"lr": 0.01, "fused": True})
        for step in range(4):
            pair.backward(step)
            flat, single = pair.step()
            assert flat < single
            torch.testing.assert_close(*([*m.module.parameters()] for m in pair.models), rtol=1e-6, atol=1e-7)

    # Other optimizers and dtypes step per tensor.
    for optim in (torch.optim.Adafactor, torch.optim.ASGD, Derived):
        pair = make_flat(optim, {"lr": 0.01})
        flat, single = pair.train(range(3))
        assert flat == single, optim
    # 16-bit dtypes on the CPU round the last elements of a tensor more often than the others.
    pair = make_flat(torch.optim.SGD, {"lr": 0.05}, lambda: Branches(torch.bfloat16), find_unused_parameters=True)
    for _ in range(3):
        for model in pair.models:
            model(batch(rank, 0, 3, 4, dtype=torch.bfloat16), "left").square().mean().backward()
        flat, single = pair.step()
    assert flat == single
    pair.assert_equal()


class Derived(torch.optim.SGD):
    """A derived class, whose step may do anything."""


@on_ranks(2)
def test_hooks_of_the_inner_optimizer_get_the_original_parameters(rank):
    pair = make_flat(torch.optim.AdamW, {"lr": 0.01})
    flat, single = pair.train(range(3))
    assert flat < single
    mine = pair.optimizers[0]
    seen = []
    handle = mine.optim.register_step_post_hook(
        lambda inner, *_: seen.extend(p for group in inner.param_groups for p in group["params"])
    )
    pair.train(range(3, 5))
    handle.remove()
    assert {*seen} == {p for p, owner in mine.param_to_rank.items() if owner == rank}
    flat, single = pair.train(range(5, 8))  # flat again, and still equal
    assert flat < single


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_unused_parameters(rank):
    options = {"find_unused_parameters": True, "transport": "shm"}
    for set_to_none in each([True, False]):
        pair = make_flat(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.5}, Branches, **options)
        for step in range(12):
            for model in pair.models:
                model(batch(rank, step, 3, 4), ("right", "left", "left")[step % 3]).square().mean().backward()
            flat, single = pair.step(set_to_none)
            pair.assert_equal()
        assert any(gathered(flat < single))
        if set_to_none:
            counts = gathered({int(entry["step"]) for entry in pair.optimizers[0].state.values()})
            assert set.union(*counts) == {4, 8, 12}  # right, left, trunk


@on_ranks(2)
def test_local_state_that_another_optimizer_takes(rank):
    """Each parameter has its own step count, so a plain optimizer that loads the state has correct counts."""
    pair = make_flat(torch.optim.AdamW, {"lr": 0.01}, lambda: nn.Linear(WIDTH, 3))
    pair.train(range(2))
    mine = pair.optimizers[0]
    params = [p for p, owner in mine.param_to_rank.items() if owner == rank]
    plain = torch.optim.AdamW(params)
    state = {index: mine.state[param] for index, param in enumerate(params)}
    plain.load_state_dict({"state": state, "param_groups": plain.state_dict()["param_groups"]})
    for param in params:
        param.grad = torch.ones_like(param)
    plain.step()
    assert {int(entry["step"]) for entry in plain.state.values()} == {3}


def one_of(optimizer):
    """A small parameter of this rank, between others."""
    mine = [p for p, rank in optimizer.param_to_rank.items() if rank == optimizer.rank and p.shape == (WIDTH, WIDTH)]
    return mine[4]


def entry_of(optimizer):
    return optimizer.state[one_of(optimizer)]


CHANGES = {
    "set_to_nothing": lambda optimizer: optimizer.state.clear(),
    "start_one_again": lambda optimizer: optimizer.state.pop(one_of(optimizer)),
    "count_one_more": lambda optimizer: entry_of(optimizer)["step"].add_(1),
    "exchange_a_tensor": lambda optimizer: entry_of(optimizer).update(exp_avg=torch.full((WIDTH, WIDTH), 0.25)),
    "write_to_a_tensor": lambda optimizer: entry_of(optimizer)["exp_avg"].fill_(0.25),
    "write_after_a_queue": lambda optimizer: entry_of(optimizer)["exp_avg"].share_memory_().fill_(0.25),
    "count_in_another_dtype": lambda optimizer: entry_of(optimizer).update(step=entry_of(optimizer)["step"].double()),
}


@on_ranks(2)
def test_the_next_step_starts_from_state_that_users_change_or_load(rank):
    for change in each(CHANGES):
        pair = make_flat(torch.optim.NAdam, {"lr": 0.01})
        before, _ = pair.train(range(3))
        saved = [copy.deepcopy(optimizer.local_state_dict()) for optimizer in pair.optimizers]
        for optimizer in pair.optimizers:
            CHANGES[change](optimizer)
        changed, single = pair.train(range(3, 6))
        assert changed < single
        for optimizer, state in zip(pair.optimizers, saved, strict=True):
            optimizer.load_state_dict(state)
        after, _ = pair.train(range(6, 9))
        assert before == after and (after < changed or change != "count_one_more")


@on_ranks(2)
def test_other_memory_graphs_with_old_values_and_steps_that_fail(rank):
    pair = make_flat(torch.optim.Adam, {"lr": 0.01})
    pair.train(range(3))
    for model in pair.models:
        model.module.layers[2].weight.data = torch.full((WIDTH, WIDTH), 0.125)
    pair.backward(3)
    early, _ = pair.step()
    late, _ = pair.train(range(4, 6))
    assert early == late  # it has moved into flat memory before the step

    # A backward through a graph that saved the old values raises.
    pair = make_flat(torch.optim.SGD, {"lr": 0.1})
    pair.train(range(2))
    model, optimizer = pair.models[0], pair.optimizers[0]
    pair.backward(2)
    loss = model.module.layers[1](torch.ones(2, WIDTH, requires_grad=True)).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    # A step that fails leaves parameters and state in place.
    pair = make_flat(torch.optim.Adam, {"lr": 0.01})
    pair.train(range(2))
    optimizer = pair.optimizers[0]

    def known():
        return [[id(p) for p in group["params"]] for group in optimizer.optim.param_groups]

    ids, before = known(), copy.deepcopy(optimizer.local_state_dict())
    pair.backward(2)
    with mock.patch.object(optimizer.optim, "step", lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert known() == ids
    assert_same_state(optimizer.local_state_dict(), before)
    pair.step()
    pair.train(range(3, 5))
