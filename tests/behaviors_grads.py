"""Checks of gradients: their averages, when they are reduced, and where they are in memory."""

import torch
import torch.distributed as dist

from tests.harness import future_of
from tests.models import Mlp, assert_grads, expected_grads, grads_of, seeded, step_on, storage_of, train_and_compare

TINY_BUCKETS_MB = 0.001  # about one parameter per bucket


def check_gradients_are_averaged_in_each_of_several_steps(ddp_class: type, rank: int) -> None:
    train_and_compare(ddp_class, rank, seeded(Mlp), step_on, 4, bucket_cap_mb=TINY_BUCKETS_MB)


def check_no_sync_communicates_nothing(ddp_class: type, rank: int) -> None:
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


def check_bucket_view_gradients_share_their_bucket(ddp_class: type, rank: int) -> None:
    ddp = ddp_class(seeded(Mlp), gradient_as_bucket_view=True)
    storages = []
    for step in range(3):
        ddp.zero_grad()
        step_on(ddp, rank, step)
        storages.append({storage_of(p.grad) for p in ddp.parameters()})
    assert len(storages[1]) == 1 and len(storages[2]) == 1, f"gradients of one bucket in {storages} storages"


def check_bucket_view_alias_survives_in_place_zeroing(ddp_class: type, rank: int) -> None:
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


def check_comm_hook_writes_reach_bucket_view_gradients(ddp_class: type, rank: int) -> None:
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
