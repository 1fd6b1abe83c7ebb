"""What torch's class promises: gradients' memory, hooks, static graphs, and what it reports of itself."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import future_of, on_ranks
from tests.models import (
    Branches,
    Mlp,
    NormNet,
    assert_grads,
    assert_steps,
    batch,
    expected_grads,
    grads_of,
    loss_of,
    same_on_all_ranks,
    seeded,
    step_on,
    storage_of,
)


@on_ranks(2)
def test_no_sync_communicates_nothing(ddp_class, rank):
    calls = 0

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += 1
        return future_of(bucket.buffer())

    ddp = ddp_class(seeded(Mlp))
    ddp.register_comm_hook(None, hook)
    with ddp.no_sync():
        step_on(ddp, rank)
        flag_inside = ddp.require_backward_grad_sync
    inside = calls
    step_on(ddp, rank)
    assert inside == 0 and not flag_inside, f"{inside} buckets were sent within no_sync"
    assert calls > 0, "no bucket was sent after no_sync"


@on_ranks(2)
def test_bucket_view_alias_survives_in_place_zeroing(ddp_class, rank):
    """After zero_grad(set_to_none=False), the next gradient is in the same memory, and correct."""
    ddp = ddp_class(seeded(Mlp), gradient_as_bucket_view=True)
    want = expected_grads(seeded(Mlp), lambda m, r: step_on(m, r, 4))
    pointers = []
    for step in range(5):
        ddp.zero_grad(set_to_none=False)
        step_on(ddp, rank, step)
        pointers.append([p.grad.data_ptr() for p in ddp.parameters()])
    one_storage = len({storage_of(p.grad) for p in ddp.parameters()}) == 1
    assert_grads(grads_of(ddp), want)
    assert one_storage, "gradients do not share the bucket"
    assert pointers[2] == pointers[3] == pointers[4], "gradients moved between steps"


@on_ranks(2)
def test_comm_hook_writes_reach_bucket_view_gradients(ddp_class, rank):
    """With views, the hook's buffer in the second step is the gradients' memory."""
    seen: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(storage_of(bucket.buffer()))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    ddp = ddp_class(seeded(Mlp), gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, hook)
    for step in range(3):
        ddp.zero_grad(set_to_none=False)
        step_on(ddp, rank, step)
    assert {storage_of(p.grad) for p in ddp.parameters()} == {seen[-1]}


@on_ranks(2)
def test_comm_hook_sees_each_gradient_once(ddp_class, rank):
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


@on_ranks(2)
def test_output_is_passed_through_without_search(ddp_class, rank):
    """Without find_unused_parameters the caller gets the model's own output."""
    outputs: list[Tensor] = []

    class Remembers(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            outputs.append(super().forward(x))
            return outputs[-1]

    got = ddp_class(seeded(Remembers))(batch(rank))
    assert got is outputs[0], f"{got.grad_fn} instead of {outputs[0].grad_fn}"


@on_ranks(2)
def test_options_are_shown_as_given(ddp_class, rank):
    plain = ddp_class(seeded(Mlp))
    told = ddp_class(seeded(Mlp), find_unused_parameters=True, bucket_cap_mb=3)
    static = ddp_class(seeded(Mlp), static_graph=True)
    for ddp, search, static_graph in ((plain, False, False), (told, True, False), (static, False, True)):
        data = ddp._get_ddp_logging_data()
        assert (ddp.find_unused_parameters, ddp.static_graph) == (search, static_graph)
        assert (data["find_unused_parameters"], data.get("static_graph", 0)) == (search, static_graph)
    assert told.bucket_bytes_cap == 3 * 1024 * 1024


@on_ranks(2)
def test_explicit_copy_is_honored(ddp_class, rank):
    ddp = ddp_class(seeded(Mlp), gradient_as_bucket_view=False)
    for step in range(3):
        ddp.zero_grad()
        step_on(ddp, rank, step)
    storages = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
    assert len(storages) == len(list(ddp.parameters())), "gradients share memory although copies were requested"
    assert ddp.gradient_as_bucket_view is False


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


@on_ranks(2)
def test_a_static_graph_whose_forward_returns_nothing(ddp_class, rank):
    """No output of the first step can end it, so the caller does, after backward, as Lightning does."""
    outputs: list[Tensor] = []

    class Keeps(Mlp):
        def forward(self, *inputs: Tensor) -> None:
            outputs.append(super().forward(*inputs))

    def step(model: Any, rank: int, number: int) -> None:
        model(batch(rank, number))
        loss_of(outputs.pop()).backward()
        if number == 0 and hasattr(model, "reducer"):
            model.reducer._delay_all_reduce()

    assert_steps(ddp_class(seeded(Keeps), static_graph=True), rank, range(3), step)


@on_ranks(2)
def test_a_static_graph_shows_whether_it_is_recorded(ddp_class, rank):
    """Programs of several backwards a step ask for it, to reduce in the first of all and in the last of each step."""
    ddp = ddp_class(seeded(Mlp), static_graph=True)
    shown = []
    for number in range(3):
        shown.append(ddp._static_graph_delay_allreduce_enqueued)
        step_on(ddp, rank, number)
    assert shown == [False, True, True]


@on_ranks(2)
def test_static_graph_allows_unused_checkpoints(ddp_class, rank):
    """Two of torch's guarantees combined: reentrant checkpoints with parameters that are never used."""

    class Spare(_Checkpointed):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(4, 4, dtype=torch.float64)

    ddp = ddp_class(seeded(Spare), static_graph=True)
    for step in range(2):
        ddp.zero_grad()
        want = expected_grads(ddp.module, lambda model, r, step=step: _run(model, r, step))
        _run(ddp, rank, step)
        got = grads_of(ddp)
        assert_grads(
            {name: got[name] for name in want if "spare" not in name}, {n: g for n, g in want.items() if g is not None}
        )


@on_ranks(2)
def test_logging_data_of_the_constructor(ddp_class, rank):
    data = ddp_class(seeded(Mlp), bucket_cap_mb=2)._get_ddp_logging_data()
    params = list(seeded(Mlp).parameters())
    assert data["world_size"] == dist.get_world_size() and data["rank"] == rank
    assert data["module_name"] == "Mlp" and data["backend_name"] == "gloo"
    assert data["num_parameter_tensors"] == len(params)
    assert data["total_parameter_size_bytes"] == sum(p.numel() * p.element_size() for p in params)
    assert data["bucket_cap_bytes"] == 2 * 1024 * 1024


@on_ranks(2)
def test_logging_data_of_training(ddp_class, rank):
    ddp = ddp_class(seeded(Mlp))
    for step in range(3):
        step_on(ddp, rank, step)
    data = ddp._get_ddp_logging_data()
    total_bytes = sum(p.numel() * p.element_size() for p in ddp.parameters())
    assert data["iteration"] >= 2 and data["has_rebuilt_buckets"] == 1
    assert sum(int(size) for size in data["rebuilt_bucket_sizes"].split(",")) == total_bytes


@pytest.mark.beyond_torch("doesn't tell")
@on_ranks(2)
def test_logging_data_of_a_static_graph(ddp_class, rank):
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


@on_ranks(2)
def test_ignored_parameters_may_be_unused(ddp_class, rank):
    """DDP doesn't wait for the gradient of an ignored parameter."""

    class WithSpare(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    model = seeded(WithSpare)
    ddp_class._set_params_and_buffers_to_ignore_for_model(model, ["spare.weight", "spare.bias", "absent"])
    ddp = ddp_class(model)
    step_on(ddp, rank, 0)
    step_on(ddp, rank, 1)
    assert ddp.module.spare.weight.grad is None
    assert ddp.parameters_to_ignore == {"spare.weight", "spare.bias", "absent"}


@on_ranks(2, 3)
def test_join_shadows_buffers(ddp_class, rank, world_size):
    ddp = ddp_class(seeded(NormNet))
    with ddp.join():
        for step in range(1 + 2 * rank):
            loss_of(ddp(batch(rank, step, 4, 3, 6, 6))).backward()
    assert same_on_all_ranks(ddp.module.buffers())
    assert ddp.module.norm.num_batches_tracked.item() == 2 * world_size - 1
