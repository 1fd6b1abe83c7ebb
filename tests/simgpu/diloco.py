"""Local steps on the simulated GPU whose weights DiLoCo merges: the CPU's weights, bit for bit."""

import contextlib
import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.simgpu.group import hooks_use_groups
from tests.simgpu.program import WIDTH, Model
from torchddp.averaging import DiLoCo, diloco


@dataclass(frozen=True)
class Merged:
    seed: int
    late: int
    fragments: int
    steps: int
    options: dict[str, Any]


def draw(seed: int) -> Merged:
    rng = random.Random(seed)
    fragments = rng.randint(1, 3)
    wire = rng.choice(("fp32", "fp32", "bf16", "int8", "int4"))
    options = {"overlap_steps": rng.randint(0, 1), "alpha": rng.choice((0.0, 0.5)), "wire": wire}
    return Merged(seed, rng.choice((0, 50, 100)), fragments, rng.randint(8, 20), options)


def _outer(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, foreach=False)


def run(program: Merged, rank: int, device: torch.device, _transport: str) -> list[Tensor]:
    torch.manual_seed(program.seed)
    model = Model((5, 64, 300), (torch.float32,) * 3).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    with contextlib.ExitStack() as stack:
        if device.type != "cpu":  # where the models are equal anyway, and no process group can send them
            stack.enter_context(hooks_use_groups())
            stack.enter_context(mock.patch.object(diloco, "broadcast_from_first"))
        optimizer = DiLoCo(
            model, inner, sync_every=6, fragments=program.fragments, outer_optimizer=_outer, **program.options
        )
    torch.manual_seed(1000 * program.seed + rank)
    for _ in range(program.steps):
        optimizer.zero_grad()
        model(torch.randn(3, WIDTH).to(device), -1, -1).square().mean().backward()
        optimizer.step()
    optimizer.finish()
    return [parameter.detach().cpu() for parameter in model.parameters()]
