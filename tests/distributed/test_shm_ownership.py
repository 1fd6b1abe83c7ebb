"""Gradients in shared memory belong to their rank: what one does to its own, no other sees."""

import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.harness import each, on_ranks
from tests.models import Mlp, assert_grads, expected_grads, grads_of, seeded, step_on

pytestmark = pytest.mark.beyond_torch("knows no shared memory")


def train(ddp, rank, steps):
    for step in steps:
        ddp.zero_grad()
        step_on(ddp, rank, step)


def trained(ddp_class, rank, **options):
    ddp = ddp_class(seeded(Mlp), transport="shm", **options)
    train(ddp, rank, range(2))
    return ddp


def want(ddp, step):
    return expected_grads(ddp.module, lambda plain, r: step_on(plain, r, step))


def train_on(ddp, rank):
    for step in range(2, 4):
        train(ddp, rank, [step])
        assert_grads(grads_of(ddp), want(ddp, step))


def clip(ddp):
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)


def unscale(ddp):
    torch._foreach_div_([p.grad for p in ddp.parameters()], 1024.0)


def zero(ddp):
    ddp.zero_grad(set_to_none=False)


def spoil(ddp):
    for p in ddp.parameters():
        p.grad.fill_(float("nan"))


@on_ranks(3)
def test_change_by_one_rank_is_its_own(rank, ddp_class):
    for change, cap_mb in each([clip, unscale, zero, spoil], [0.001, 25]):
        ddp = trained(ddp_class, rank, bucket_cap_mb=cap_mb)
        right = want(ddp, 1)
        dist.barrier()
        if rank == 1:
            change(ddp)
            assert not torch.equal(ddp.module.first.weight.grad, right["first.weight"])
        dist.barrier()
        if rank != 1:
            assert_grads(grads_of(ddp), right)
        # Nor is it of consequence for the next step.
        train_on(ddp, rank)
    # Only gradients are shared: an optimizer of one rank changes no other's weights.
    before = [p.detach().clone() for p in ddp.parameters()]
    dist.barrier()
    if rank == 0:
        torch.optim.SGD(ddp.parameters(), lr=1.0).step()
    dist.barrier()
    assert all(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True)) == (rank != 0)


@on_ranks(2)
def test_changes_and_gradients_over_steps(rank, ddp_class):
    # A rank is done with a step, and writes over its gradients, while another has hardly begun to wait for its own.
    ddp = trained(ddp_class, rank, bucket_cap_mb=0.001)
    for step in range(2, 40):
        train(ddp, rank, [step])
        if step % 2 == rank:
            spoil(ddp)
        else:
            assert_grads(grads_of(ddp), want(ddp, step))

    # As documented: a view has the next step's values; a copy keeps its own. No other rank's in either case.
    for views in each([True, False]):
        ddp = trained(ddp_class, rank, gradient_as_bucket_view=views)
        kept = ddp.module.last.weight.grad
        train(ddp, rank, [2])
        assert_grads({"last.weight": kept}, {"last.weight": want(ddp, 2 if views else 1)["last.weight"]})


@on_ranks(2, needed_ranks=[0])
def test_gradients_outlive_module_and_peer(rank, ddp_class):
    ddp = trained(ddp_class, rank)
    right = want(ddp, 1)
    module = ddp.module
    del ddp
    gc.collect()
    assert_grads(grads_of(module), right)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()  # the peer has gone
    assert_grads(grads_of(module), right)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    step_on(module, rank)
    for p in module.parameters():
        p.grad.mul_(2)


def in_child(body):
    """Whether `body`, in a fork of this process, came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@on_ranks(2)
def test_forked_children(rank, ddp_class):
    """The worker of a DataLoader, or whatever a rank forks."""
    made = [trained(ddp_class, rank)]
    right = want(made[0], 1)

    def reads_drops_its_copies_and_leaves():
        assert_grads(grads_of(made[0]), right)
        made[0].zero_grad()
        made[0].module.first.weight.grad = torch.ones_like(made[0].module.first.weight)
        gc.collect()

    def deletes_the_module():
        made.clear()
        gc.collect()

    assert in_child(reads_drops_its_copies_and_leaves)
    assert_grads(grads_of(made[0]), right)
    dist.barrier()
    if rank == 0:  # shared mappings are inherited: what a child writes into `.grad` its parent sees; no other rank does
        assert in_child(lambda: spoil(made[0]))
        assert made[0].module.first.weight.grad.isnan().all()
    dist.barrier()
    if rank == 1:
        assert_grads(grads_of(made[0]), right)
    train_on(made[0], rank)
    assert in_child(deletes_the_module)  # the transport's end in a child is not the end of the rank
    train_on(made[0], rank)
