"""Checks of options, uneven inputs, and of what the class reports."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from tests.harness import future_of
from tests.models import Branches, Mlp, NormNet, batch, loss_of, same_on_all_ranks, seeded, step_on, train_and_compare


def check_comm_hook_sees_each_gradient_once(ddp_class: type, rank: int) -> None:
    """In each step the buckets hold all parameters and arrive in index order; only the last is marked."""
    steps: list[list[tuple[int, bool, int, int]]] = [[]]
    state = object()
    states = []

    def note(given: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        states.append(given)
        numel = sum(g.numel() for g in bucket.gradients())
        steps[-1].append((bucket.index(), bucket.is_last(), len(bucket.parameters()), numel))
        assert bucket.buffer().numel() >= numel
        return future_of(bucket.buffer())

    ddp = ddp_class(seeded(Mlp), bucket_cap_mb=0.001)
    ddp.register_comm_hook(state, note)
    for step in range(3):
        step_on(ddp, rank, step)
        steps.append([])
    total = sum(p.numel() for p in ddp.parameters())
    for seen in steps[:3]:
        assert [index for index, *_ in seen] == list(range(len(seen))), seen
        assert [last for _, last, *_ in seen] == [False] * (len(seen) - 1) + [True], seen
        assert sum(count for _, _, count, _ in seen) == len(list(ddp.parameters()))
        assert sum(numel for *_, numel in seen) == total
    assert all(given is state for given in states)


def check_output_is_passed_through_without_search(ddp_class: type, rank: int) -> None:
    """Without find_unused_parameters the caller gets the model's own output."""
    outputs: list[Tensor] = []

    class Remembers(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            outputs.append(super().forward(x))
            return outputs[-1]

    got = ddp_class(seeded(Remembers))(batch(rank))
    assert got is outputs[0], f"{got.grad_fn} instead of {outputs[0].grad_fn}"


def check_options_are_shown_as_given(ddp_class: type, rank: int) -> None:
    plain = ddp_class(seeded(Mlp))
    told = ddp_class(seeded(Mlp), find_unused_parameters=True, bucket_cap_mb=3)
    static = ddp_class(seeded(Mlp), static_graph=True)
    for ddp, search, static_graph in ((plain, False, False), (told, True, False), (static, False, True)):
        data = ddp._get_ddp_logging_data()
        assert (ddp.find_unused_parameters, ddp.static_graph) == (search, static_graph)
        assert (data["find_unused_parameters"], data.get("static_graph", 0)) == (search, static_graph)
    assert told.bucket_bytes_cap == 3 * 1024 * 1024


def check_explicit_copy_is_honored(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(Mlp), gradient_as_bucket_view=False)
    for step in range(3):
        ddp.zero_grad()
        step_on(ddp, rank, step)
    storages = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
    assert len(storages) == len(list(ddp.parameters())), "gradients share memory although copies were requested"
    assert ddp.gradient_as_bucket_view is False


def check_bucket_view_option_is_shown(ddp_class: type, rank: int) -> None:
    assert ddp_class(seeded(Mlp), gradient_as_bucket_view=True).gradient_as_bucket_view is True


class _Checkpointed(nn.Module):
    """One layer in two reentrant checkpoints: its hooks fire twice per step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.second, x, use_reentrant=True)
        return x


def _run(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model(batch(rank, step, 3, 4))).backward()


def check_static_graph_allows_repeated_checkpoints(ddp_class: type, rank: int) -> None:
    train_and_compare(ddp_class, rank, seeded(_Checkpointed), _run, 3, static_graph=True)


def check_static_graph_allows_unused_parameters(ddp_class: type, rank: int) -> None:
    def run(model: nn.Module, r: int, step: int) -> None:
        loss_of(model(batch(r, step, 3, 4), "left")).backward()

    used = ("trunk.weight", "left.weight", "left.bias")
    train_and_compare(ddp_class, rank, seeded(Branches), run, 3, *used, static_graph=True)


def check_static_graph_allows_unused_checkpoints(ddp_class: type, rank: int) -> None:
    """Two of torch's guarantees combined: reentrant checkpoints with parameters that are never used."""

    class Spare(_Checkpointed):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(4, 4, dtype=torch.float64)

    train_and_compare(ddp_class, rank, seeded(Spare), _run, 2, "first.weight", "second.weight", static_graph=True)


def check_logging_data_of_the_constructor(ddp_class: type, rank: int) -> None:
    data = ddp_class(seeded(Mlp), bucket_cap_mb=2)._get_ddp_logging_data()
    params = list(seeded(Mlp).parameters())
    assert data["world_size"] == dist.get_world_size() and data["rank"] == rank
    assert data["module_name"] == "Mlp" and data["backend_name"] == "gloo"
    assert data["num_parameter_tensors"] == len(params)
    assert data["total_parameter_size_bytes"] == sum(p.numel() * p.element_size() for p in params)
    assert data["bucket_cap_bytes"] == 2 * 1024 * 1024


def check_logging_data_of_training(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(Mlp))
    for step in range(3):
        step_on(ddp, rank, step)
    data = ddp._get_ddp_logging_data()
    total_bytes = sum(p.numel() * p.element_size() for p in ddp.parameters())
    assert data["iteration"] >= 2 and data["has_rebuilt_buckets"] == 1
    assert sum(int(size) for size in data["rebuilt_bucket_sizes"].split(",")) == total_bytes


def check_logging_data_of_a_static_graph(ddp_class: type, rank: int) -> None:
    for changes in (False, True):
        ddp = ddp_class(seeded(Branches), find_unused_parameters=True)
        for step in range(5):
            branch = "right" if changes and step == 1 else "left"
            loss_of(ddp(batch(rank, step, 3, 4), branch)).backward()
        assert bool(ddp._get_ddp_logging_data()["can_set_static_graph"]) is not changes
    # Nothing is known before the second step, and nothing is gained where the graph is not searched.
    for options, steps in (({"find_unused_parameters": True}, 1), ({}, 5)):
        ddp = ddp_class(seeded(Mlp), **options)
        for step in range(steps):
            step_on(ddp, rank, step)
        assert not ddp._get_ddp_logging_data().get("can_set_static_graph")


def check_logging_data_of_the_comm_hook(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(Mlp))
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    step_on(ddp, rank)
    step_on(ddp, rank)
    assert ddp._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"


def check_second_comm_hook_is_refused(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(Mlp))
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="hook"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)


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
