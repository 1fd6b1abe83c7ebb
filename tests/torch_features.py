"""Helpers for the tests of torch's features with our class."""

from collections.abc import Callable

import torch
from torch import nn

import torchddp
from tests.harness import is_own_class
from tests.models import Grads, assert_grads
from tests.parity.compare import TorchDDP

Program = Callable[[type], list[Grads]]  # DDP class -> the gradients after each step


def assert_same_program(ddp_class: type, program: Program, *, reductions: int | None) -> None:
    """Run the program with torch's class and the class under test; gradients must be bitwise equal after every step.

    `reductions`: how many backwards our reducer must have finished (None: at least one).
    """
    want = program(TorchDDP)
    before = torchddp.finished_steps()
    got = program(ddp_class)
    finished = torchddp.finished_steps() - before
    assert len(got) == len(want) > 0
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert_grads(ours, theirs, rtol=0, what=f"step {step}:")
    if is_own_class():
        assert finished == reductions if reductions is not None else finished > 0, f"{finished} reductions"


class Block(nn.Module):
    """A user-defined module, which torch.compile treats differently from torch's own modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Blocks(nn.Module):
    """A sequence of equal blocks."""

    def __init__(self, width: int = 256, count: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
