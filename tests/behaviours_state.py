"""Checks of what is kept equal between ranks besides gradients: parameters, buffers, ignored state, uneven inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import gathered
from tests.models import (
    Mlp,
    NormNet,
    assert_grads,
    batch,
    expected_grads,
    grads_of,
    local_grads,
    loss_of,
    seeded,
    step_on,
)


def _assert_ranks_agree(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    mine = {name: value.detach().clone() for name, value in named}
    for other in gathered(mine):
        _assert_same(other, mine)
    return mine


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in want:
        assert torch.equal(got[name], want[name]), f"'{name}' is {got[name]} instead of {want[name]}"


def check_parameters_start_as_on_rank_zero(ddp_class: type, rank: int) -> None:
    want = dict(seeded(Mlp, seed=0).named_parameters())
    ddp = ddp_class(seeded(Mlp, seed=rank))
    _assert_same(dict(ddp.module.named_parameters()), want)


def check_buffers_start_as_on_rank_zero(ddp_class: type, rank: int) -> None:
    model = seeded(NormNet)
    model.norm.running_mean.fill_(rank + 1)
    model.norm.num_batches_tracked.fill_(rank + 3)
    ddp = ddp_class(model)
    assert torch.equal(ddp.module.norm.running_mean, torch.ones(4, dtype=torch.float64))
    assert ddp.module.norm.num_batches_tracked.item() == 3


def check_training_from_different_seeds_ends_equal(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(Mlp, seed=rank))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        step_on(ddp, rank, step)
        optimizer.step()
    _assert_ranks_agree(ddp.module.named_parameters())


def check_different_shapes_are_refused(ddp_class: type, rank: int) -> None:
    model = nn.Linear(4, 4 + rank)
    try:
        ddp_class(model)
    except RuntimeError:
        return
    # One rank (torch's rank 0) may learn of it only by the group's end: some rank must refuse, and rank 1 always can.
    assert rank == 0, "a model of another shape was accepted"


class _MixedBuffers(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2, dtype=torch.float64)
        for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16):
            value = torch.full((3,), rank + 1).to(dtype) if dtype is not torch.bool else torch.full((3,), rank == 0)
            self.register_buffer(str(dtype).replace("torch.", "of_"), value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def check_buffers_of_mixed_dtypes_follow_rank_zero(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(_MixedBuffers(rank))
    started = {name: value.clone() for name, value in ddp.module.named_buffers()}
    with torch.no_grad():
        for value in ddp.module.buffers():
            value.copy_(torch.full((3,), rank) if value.dtype is not torch.bool else torch.full((3,), rank == 1))
    loss_of(ddp(batch(rank, 0, 3, 4))).backward()
    for name, value in ddp.module.named_buffers():
        want_start = torch.ones(3).to(value.dtype)
        assert torch.equal(started[name], want_start), f"buffer '{name}' started as {started[name]}"
        assert not value.any(), f"buffer '{name}' is {value} after the forward instead of rank 0's zeros"


def check_running_statistics_follow_rank_zero(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(NormNet))
    own = NormNet()
    own.load_state_dict({k.removeprefix("module."): v.clone() for k, v in ddp.state_dict().items()})
    loss_of(ddp(batch(rank, 0, 4, 3, 6, 6))).backward()
    loss_of(ddp(batch(rank, 1, 4, 3, 6, 6))).backward()
    # By hand: rank 0's first batch decides what all ranks start the second forward with.
    with torch.no_grad():
        own(batch(0, 0, 4, 3, 6, 6))
        own(batch(rank, 1, 4, 3, 6, 6))
    torch.testing.assert_close(ddp.module.norm.running_mean, own.norm.running_mean)
    torch.testing.assert_close(ddp.module.norm.running_var, own.norm.running_var)


def check_reassigned_buffer_follows_rank_zero(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(NormNet).eval())
    loss_of(ddp(batch(rank, 0, 4, 3, 6, 6))).backward()
    ddp.module.norm.running_mean = torch.full((4,), float(rank + 5), dtype=torch.float64)
    loss_of(ddp(batch(rank, 1, 4, 3, 6, 6))).backward()
    assert torch.equal(ddp.module.norm.running_mean, torch.full((4,), 5.0, dtype=torch.float64))


def check_buffers_stay_local_when_told_so(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(NormNet).eval(), forward_sync_buffers=False)
    ddp.module.norm.running_mean.fill_(rank + 5)
    loss_of(ddp(batch(rank, 0, 4, 3, 6, 6))).backward()
    assert torch.equal(ddp.module.norm.running_mean, torch.full((4,), rank + 5.0, dtype=torch.float64))


def _ignoring(ddp_class: type, model: nn.Module, names: list[str]) -> nn.Module:
    ddp_class._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[attr-defined]
    return ddp_class(model)


def check_ignored_parameters_keep_their_value(ddp_class: type, rank: int) -> None:
    model = seeded(Mlp, seed=rank)
    own = model.middle.weight.detach().clone()
    ddp = _ignoring(ddp_class, model, ["middle.weight"])
    assert torch.equal(ddp.module.middle.weight, own)
    assert torch.equal(ddp.module.last.weight, seeded(Mlp, seed=0).last.weight)


def check_ignored_gradients_stay_local(ddp_class: type, rank: int) -> None:
    model = seeded(Mlp)
    want = expected_grads(model, step_on)
    want |= {name: grad for name, grad in local_grads(model, lambda m: step_on(m, rank)).items() if "middle" in name}
    ddp = _ignoring(ddp_class, model, ["middle.weight", "middle.bias"])
    step_on(ddp, rank)
    assert_grads(grads_of(ddp), want)


def check_ignored_buffers_stay_local(ddp_class: type, rank: int) -> None:
    model = seeded(NormNet).eval()
    model.norm.running_mean.fill_(rank + 2)
    ddp = _ignoring(ddp_class, model, ["norm.running_mean"])
    ddp.module.norm.running_var.fill_(rank + 2)
    loss_of(ddp(batch(rank, 0, 4, 3, 6, 6))).backward()
    assert torch.equal(ddp.module.norm.running_mean, torch.full((4,), rank + 2.0, dtype=torch.float64))
    assert torch.equal(ddp.module.norm.running_var, torch.full((4,), 2.0, dtype=torch.float64))


def check_ignored_parameters_may_be_unused(ddp_class: type, rank: int) -> None:
    """Nobody waits for the gradient of a parameter that is none of DDP's business."""

    class WithSpare(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    ddp = _ignoring(ddp_class, seeded(WithSpare), ["spare.weight", "spare.bias"])
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
    """Rank 1 has two inputs more than rank 0; the gradient of the k-th step of rank r is stamped r + 2 k + 1."""
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


def check_join_ends_with_the_last_ranks_model(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(Mlp))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            step_on(ddp, rank, step)
            optimizer.step()
    last = _assert_ranks_agree(ddp.module.named_parameters())["last.weight"]
    assert not torch.equal(last, seeded(Mlp).last.weight)


def check_join_shadows_buffers(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(NormNet))
    with ddp.join():
        for step in range(1 + 2 * rank):
            loss_of(ddp(batch(rank, step, 4, 3, 6, 6))).backward()
    _assert_ranks_agree(ddp.module.named_buffers())
    assert ddp.module.norm.num_batches_tracked.item() == 3
