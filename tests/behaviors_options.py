"""Checks of options and of what the class reports: hooks, static graph, unused parameters, logging."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from tests.harness import future_of
from tests.models import Branches, Mlp, batch, loss_of, seeded, step_on, train_and_compare


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
