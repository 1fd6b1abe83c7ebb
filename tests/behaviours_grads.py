"""Checks of the gradients: averaged, in time, for all shapes of outputs, and where they live in memory."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import (
    Branches,
    Mlp,
    Pair,
    TwoHeads,
    assert_grads,
    batch,
    expected_grads,
    grads_of,
    local_grads,
    loss_of,
    seeded,
    step_on,
    storage_of,
    train_and_compare,
)

TINY_BUCKETS_MB = 0.001  # about one parameter a bucket


def check_gradients_are_averaged_in_each_of_several_steps(ddp_class: type, rank: int) -> None:
    train_and_compare(ddp_class, rank, seeded(Mlp), step_on, 4, bucket_cap_mb=TINY_BUCKETS_MB)


def check_gradients_accumulate_without_zero_grad(ddp_class: type, rank: int) -> None:
    model = seeded(Mlp)
    want = expected_grads(model, lambda m, r: (step_on(m, r, 0), step_on(m, r, 1)))
    ddp = ddp_class(model)
    step_on(ddp, rank, 0)
    step_on(ddp, rank, 1)
    assert_grads(grads_of(ddp), want)


def check_training_equals_one_process(ddp_class: type, rank: int) -> None:
    """SGD on the mean over ranks, against one process that sees all batches."""
    plain, world_size = seeded(Mlp), dist.get_world_size()
    ddp = ddp_class(seeded(Mlp))
    ours = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    for step in range(5):
        ours.zero_grad()
        step_on(ddp, rank, step)
        ours.step()
        theirs.zero_grad()
        (sum(loss_of(plain(batch(r, step))) for r in range(world_size)) / world_size).backward()
        theirs.step()
    for (name, p), q in zip(ddp.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def _check_structures(*wraps: Any, **options: Any) -> Any:
    """The check that outputs in these structures take part, two steps each."""

    def run(model: nn.Module, r: int, step: int) -> None:
        output = model(batch(r, step, 3, 4))
        if isinstance(output, list):
            output = [value for part in output for value in part.values()]
        loss_of(output).backward()

    def check(ddp_class: type, rank: int) -> None:
        for wrap in wraps:
            train_and_compare(ddp_class, rank, seeded(lambda wrap=wrap: TwoHeads(wrap)), run, 2, **options)

    return check


def _as_tuple(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


def _as_dict(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {"a": a, "b": b}


check_model_that_returns_no_bare_tensor = _check_structures(
    _as_tuple, _as_dict, lambda a, b: [{"a": a}, {"b": b}], Pair
)
check_dict_output_with_unused_search = _check_structures(_as_dict, find_unused_parameters=True)
check_dataclass_output_with_unused_search = _check_structures(Pair, find_unused_parameters=True)
check_tuple_output_with_static_graph = _check_structures(_as_tuple, static_graph=True)


def check_partial_use_of_the_outputs(ddp_class: type, rank: int) -> None:
    """Only one head is in the loss, another one on each rank."""

    def run(model: nn.Module, r: int, step: int) -> None:
        loss_of(model(batch(r, step, 3, 4))[r % 2]).backward()

    train_and_compare(ddp_class, rank, seeded(TwoHeads), run, 1, find_unused_parameters=True)


def check_unused_parameters_differ_per_rank(ddp_class: type, rank: int) -> None:
    def run(model: nn.Module, r: int, step: int) -> None:
        loss_of(model(batch(r, step, 3, 4), ("left", "right")[(r + step) % 2])).backward()

    train_and_compare(ddp_class, rank, seeded(Branches), run, 3, find_unused_parameters=True)


def check_globally_unused_parameters_keep_their_gradient(ddp_class: type, rank: int) -> None:
    """A parameter no rank used keeps what it had: None, or the value from before."""
    ddp = ddp_class(seeded(Branches), find_unused_parameters=True)
    loss_of(ddp(batch(rank, 0, 3, 4), "left")).backward()
    first = ddp.module.never.weight.grad
    ddp.module.never.weight.grad = torch.full((4, 4), 7.0, dtype=torch.float64)
    loss_of(ddp(batch(rank, 1, 3, 4), "left")).backward()
    assert first is None
    assert torch.equal(ddp.module.never.weight.grad, torch.full((4, 4), 7.0, dtype=torch.float64))


def check_no_sync_keeps_gradients_local(ddp_class: type, rank: int) -> None:
    model = seeded(Mlp)
    want = local_grads(model, lambda m: step_on(m, rank))
    ddp = ddp_class(model)
    with ddp.no_sync():
        step_on(ddp, rank)
    assert_grads(grads_of(ddp), want)


def check_no_sync_then_sync_averages_the_sum(ddp_class: type, rank: int) -> None:
    """Accumulation over three micro-batches, also in the second round, after the buckets were rebuilt."""
    model = seeded(Mlp)
    ddp = ddp_class(model, bucket_cap_mb=TINY_BUCKETS_MB)
    got, halfway, want = [], [], []
    for round_ in range(2):
        steps = range(3 * round_, 3 * round_ + 3)
        want.append(expected_grads(model, lambda m, r, steps=steps: [step_on(m, r, step) for step in steps]))
        ddp.zero_grad()
        with ddp.no_sync():
            step_on(ddp, rank, steps[0])
            step_on(ddp, rank, steps[1])
            halfway.append((grads_of(ddp), local_grads(model, lambda m, s=steps: [step_on(m, rank, x) for x in s[:2]])))
        step_on(ddp, rank, steps[2])
        got.append(grads_of(ddp))
    for round_ in range(2):
        assert_grads(*halfway[round_], what=f"within no_sync, round {round_}:")
        assert_grads(got[round_], want[round_], what=f"round {round_}:")


def check_no_sync_communicates_nothing(ddp_class: type, rank: int) -> None:
    calls = 0

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = ddp_class(seeded(Mlp))
    ddp.register_comm_hook(None, hook)
    with ddp.no_sync():
        step_on(ddp, rank)
        flag_inside = ddp.require_backward_grad_sync
    inside = calls
    step_on(ddp, rank)
    assert inside == 0 and not flag_inside, f"{inside} buckets were sent within no_sync"
    assert calls > 0, "no bucket was sent after no_sync"


def check_sparse_embedding_gradients(ddp_class: type, rank: int) -> None:
    def make() -> nn.Module:
        embedding = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
        return nn.Sequential(embedding, nn.Linear(4, 2, dtype=torch.float64))

    def run(model: nn.Module, r: int, step: int) -> None:
        loss_of(model(torch.tensor([r, 3, 3, 5 + step]))).backward()

    ddp = train_and_compare(ddp_class, rank, seeded(make), run, 2)
    assert ddp.module[0].weight.grad.is_sparse


def check_bucket_view_gradients_share_their_bucket(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(Mlp), gradient_as_bucket_view=True)
    storages = []
    for step in range(3):
        ddp.zero_grad()
        step_on(ddp, rank, step)
        storages.append({storage_of(p.grad) for p in ddp.parameters()})
    assert len(storages[1]) == 1 and len(storages[2]) == 1, f"gradients of one bucket in {storages} storages"


def check_kept_gradients_do_not_change(ddp_class: type, rank: int) -> None:
    """What is kept of .grad, and views of it, are of their step; .grad is made anew once it was set to None."""
    ddp = ddp_class(seeded(Mlp))
    kept, before = [], []
    for step in range(4):
        ddp.zero_grad()
        step_on(ddp, rank, step)
        kept += [g for p in ddp.parameters() for g in (p.grad, p.grad.view(-1), p.grad.detach())]
        before += [g.clone() for g in kept[len(before) :]]
    changed = sum(not torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert not changed, f"{changed} of {len(kept)} kept gradients have changed"


def check_assigned_gradients_get_the_averages(ddp_class: type, rank: int) -> None:
    """Memory of the program's own, of which it made .grad, holds the averages after each step."""
    ddp = ddp_class(seeded(Mlp))
    parameters = list(ddp.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    for step in range(3):
        want = expected_grads(seeded(Mlp), lambda m, r, step=step: step_on(m, r, step))
        flat.zero_()
        step_on(ddp, rank, step)
        parts = flat.split([p.numel() for p in parameters])
        got = {n: part.view_as(p) for (n, p), part in zip(ddp.module.named_parameters(), parts, strict=True)}
        assert_grads(got, want, what=f"step {step}:")


def check_bucket_view_alias_survives_in_place_zeroing(ddp_class: type, rank: int) -> None:
    """zero_grad(set_to_none=False) between steps: the gradient stays the very same memory, and right."""
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


def check_comm_hook_writes_reach_bucket_view_gradients(ddp_class: type, rank: int) -> None:
    """With views, the buffer the hook sees in the second step is the memory the gradients live in."""
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
