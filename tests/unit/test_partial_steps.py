"""An optimizer's step in parts is the step."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchddp.optim import partial_steps

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adafactor, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01}),
]


def make(optim: type[torch.optim.Optimizer], options: dict) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size)) for size in ((3, 4), (5,), (), (2, 2), (7,))]
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.03}]
    return params, optim(groups, **options)


def set_grads(params: list[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize(("optim", "options"), OPTIMIZERS, ids=[optim.__name__ for optim, _ in OPTIMIZERS])
@given(bucket_of=st.lists(st.integers(-1, 2), min_size=5, max_size=5), order=st.permutations(range(4)))
def test_parts_in_any_order_are_the_whole(optim, options, bucket_of, order) -> None:
    params, parted = make(optim, options)
    others, whole = make(optim, options)
    for step in range(3):
        buckets = [[p for p, b in zip(params, bucket_of, strict=True) if b == bucket] for bucket in range(3)]
        parts, rest = partial_steps.parts_of(parted, buckets)
        assert sum(len(found) for part in [*parts, rest] for _, found in part) == 5
        set_grads(params, step)
        set_grads(others, step)
        now = partial_steps.options_of(parted)
        for index in order:
            partial_steps.step(parted, [*parts, rest][index], now)
        whole.step()
        for mine, theirs in zip(params, others, strict=True):
            assert torch.equal(mine, theirs)
        mine, theirs = copy.deepcopy(parted.state_dict()), whole.state_dict()
        assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()


def test_options_are_those_that_were_noted_and_later_changes_stay() -> None:
    params, parted = make(torch.optim.SGD, {"lr": 0.1})
    parts, rest = partial_steps.parts_of(parted, [params[:1], params[1:]])
    assert rest == []
    set_grads(params, 0)
    noted = partial_steps.options_of(parted)
    parted.param_groups[0]["lr"] = 7.0
    parted.param_groups[1]["new"] = "kept"
    before = [param.detach().clone() for param in params]
    partial_steps.step(parted, parts[0], noted)
    assert torch.equal(params[0], before[0] - 0.1 * params[0].grad)
    assert all(torch.equal(a, b) for a, b in zip(params[1:], before[1:], strict=True))
    assert parted.param_groups[0]["lr"] == 7.0 and parted.param_groups[1]["new"] == "kept"
    assert [len(group["params"]) for group in parted.param_groups] == [3, 2]
    partial_steps.zero_grad(parted, parts[1], True)
    assert [param.grad is None for param in params] == [False, True, True, True, True]


def test_a_step_that_fails_leaves_the_groups_whole() -> None:
    params, parted = make(torch.optim.SGD, {"lr": 0.1})
    parts, _ = partial_steps.parts_of(parted, [params[:1], params[1:]])
    noted = partial_steps.options_of(parted)
    noted[0]["lr"] = "much"
    set_grads(params, 0)
    with pytest.raises(TypeError):
        partial_steps.step(parted, parts[1], noted)
    assert parted.param_groups[0]["lr"] == 0.1 and [len(g["params"]) for g in parted.param_groups] == [3, 2]


def test_a_forwards_modes_do_not_reach_the_update() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), partial_steps.outside_of_forward("cpu"):
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        made = torch.ones(2, 2) @ torch.ones(2, 2)
    assert made.dtype == torch.float32 and not made.is_inference()
