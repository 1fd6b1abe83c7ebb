"""Checks of ignored parameters and of uneven inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import Mlp, NormNet, batch, loss_of, same_on_all_ranks, seeded, step_on


def check_ignored_parameters_may_be_unused(ddp_class: type, rank: int) -> None:
    """DDP doesn't wait for the gradient of an ignored parameter."""

    class WithSpare(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    model = seeded(WithSpare)
    ddp_class._set_params_and_buffers_to_ignore_for_model(model, ["spare.weight", "spare.bias"])  # type: ignore[attr-defined]
    ddp = ddp_class(model)
    step_on(ddp, rank, 0)
    step_on(ddp, rank, 1)
    assert ddp.module.spare.weight.grad is None
    assert ddp.parameters_to_ignore == {"spare.weight", "spare.bias"}


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _uneven_grads(ddp: nn.Module, rank: int, **options: Any) -> list[float]:
    """Rank 1 has two more inputs than rank 0; in step k the gradient of rank r is r + 2 k + 1."""
    seen = []
    with ddp.join(**options):
        for step in range(2 + 2 * rank):
            ddp.zero_grad()
            ddp(torch.tensor([float(rank + 2 * step + 1)], dtype=torch.float64)).sum().backward()
            seen.append(ddp.module.weight.grad.item())
    return seen


def check_join_averages_over_the_initial_world(ddp_class: type, rank: int) -> None:
    want = [(1 + 2) / 2, (3 + 4) / 2, 6 / 2, 8 / 2]
    assert _uneven_grads(ddp_class(_Scalar()), rank) == want[: 2 + 2 * rank]


def check_join_averages_over_those_left(ddp_class: type, rank: int) -> None:
    want = [(1 + 2) / 2, (3 + 4) / 2, 6.0, 8.0]
    got = _uneven_grads(ddp_class(_Scalar()), rank, divide_by_initial_world_size=False)
    assert got == pytest.approx(want[: 2 + 2 * rank], rel=1e-9)


def check_join_shadows_buffers(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(NormNet))
    with ddp.join():
        for step in range(1 + 2 * rank):
            loss_of(ddp(batch(rank, step, 4, 3, 6, 6))).backward()
    assert same_on_all_ranks(ddp.module.buffers())
    assert ddp.module.norm.num_batches_tracked.item() == 3
