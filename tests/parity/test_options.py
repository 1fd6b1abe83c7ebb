"""Options in combination: hypothesis picks them, gradients must equal torch DDP's in every step."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.models import batch, loss_of
from tests.parity.compare import assert_same_as_torch

HOOKS = {"none": None, "allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}


class Zoo(nn.Module):
    """Layers of many sizes, two branches, a shared layer, a frozen one and buffers."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.unused = unused
        self.inlet = nn.Linear(4, 6)
        self.shared = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        hidden = self.norm(self.shared(torch.tanh(self.inlet(x))))
        hidden = self.shared(torch.tanh(self.frozen(hidden)))
        if not self.unused:
            return self.left(hidden) + self.right(hidden)
        return self.left(hidden) if branch == 0 else self.right(hidden)


@dataclass(frozen=True)
class Case:
    """One combination of options and of a way to train."""

    world_size: int
    options: tuple[tuple[str, Any], ...]
    hook: str
    set_to_none: bool
    micro_batches: tuple[int, ...]  # of each step; all but the last within no_sync
    unused: bool

    def branch(self, rank: int, step: int) -> int:
        same_for_ever = dict(self.options)["static_graph"]
        return 0 if same_for_ever else (rank + step) % 2


@st.composite
def cases(draw: st.DrawFn) -> Case:
    search = draw(st.booleans())
    static = draw(st.booleans())
    unused = draw(st.booleans()) and (search or static)
    options = {
        "find_unused_parameters": search,
        "static_graph": static,
        "gradient_as_bucket_view": draw(st.booleans()),
        "bucket_cap_mb": draw(st.sampled_from([None, 0.00005, 0.0002, 1, 25])),
        "batched_grad_copy": draw(st.booleans()),
        # Legal only where unused parameters are the same on all ranks for ever.
        "skip_all_reduce_unused_params": draw(st.booleans()) and unused and static,
    }
    # torch itself miscounts a static graph with accumulation: tests/distributed/test_incumbent_bugs.py has that case.
    steps = [1, 1, 1] if static else draw(st.lists(st.integers(1, 3), min_size=3, max_size=4))
    hook = draw(st.sampled_from(sorted(HOOKS)))
    return Case(
        world_size=draw(st.sampled_from([1, 2, 2, 3])),
        options=tuple(options.items()),
        hook=hook,
        set_to_none=draw(st.booleans()),
        micro_batches=tuple(steps),
        unused=unused,
    )


def _run(case: Case, model: nn.Module, rank: int, step: int) -> None:
    count = case.micro_batches[step]

    def micro(index: int) -> None:
        x = batch(rank, 10 * step + index, 5, 4, dtype=torch.float32)
        loss_of(model(x, case.branch(rank, step))).backward()

    if count > 1:
        with model.no_sync():  # type: ignore[operator]
            for index in range(count - 1):
                micro(index)
    micro(count - 1)


def _register(case: Case, ddp: nn.Module) -> None:
    if case.hook != "none":
        ddp.register_comm_hook(None, HOOKS[case.hook])  # type: ignore[operator]


def _rtol(case: Case) -> float:
    if case.hook == "fp16" and case.world_size > 2:
        return 4e-3
    return 0.0 if case.world_size <= 2 else 1e-6


@pytest.mark.slow
@given(cases())
def test_any_combination_of_options(ddp_class, case):
    assert_same_as_torch(
        ddp_class,
        lambda: Zoo(case.unused),
        lambda model, rank, step: _run(case, model, rank, step),
        case.world_size,
        steps=len(case.micro_batches),
        rtol=_rtol(case),
        options=dict(case.options),
        prepare=lambda ddp: _register(case, ddp),
        set_to_none=case.set_to_none,
    )
