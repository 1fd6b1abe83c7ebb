"""Gradients in shared memory belong to their rank: what one does to its own, no other sees."""

import gc
import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.harness import on_ranks, run_outcomes
from tests.models import Mlp, assert_grads, expected_grads, grads_of, seeded, step_on

pytestmark = pytest.mark.beyond_torch("knows no shared memory")


def trained(ddp_class, rank, steps=2, **options):
    ddp = ddp_class(seeded(Mlp), transport="shm", **options)
    for step in range(steps):
        ddp.zero_grad()
        step_on(ddp, rank, step)
    return ddp


def want(ddp, step):
    return expected_grads(ddp.module, lambda plain, r: step_on(plain, r, step))


def clip(ddp):
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)


def unscale(ddp):
    torch._foreach_div_([p.grad for p in ddp.parameters()], 1024.0)


def zero(ddp):
    ddp.zero_grad(set_to_none=False)


def spoil(ddp):
    for p in ddp.parameters():
        p.grad.fill_(float("nan"))


@pytest.mark.parametrize("change", [clip, unscale, zero, spoil])
@pytest.mark.parametrize("cap_mb", [0.001, 25], ids=["small buckets", "one bucket"])
@on_ranks(3)
def test_change_by_one_rank_is_its_own(rank, ddp_class, change, cap_mb):
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
    ddp.zero_grad()
    step_on(ddp, rank, 2)
    assert_grads(grads_of(ddp), want(ddp, 2))


@on_ranks(2)
def test_change_before_the_peers_have_looked(rank, ddp_class):
    """A rank is done with a step, and writes over its gradients, while another has hardly begun to wait for its own."""
    ddp = trained(ddp_class, rank, bucket_cap_mb=0.001)
    for step in range(2, 40):
        ddp.zero_grad()
        step_on(ddp, rank, step)
        if step % 2 == rank:
            spoil(ddp)
        else:
            assert_grads(grads_of(ddp), want(ddp, step))


@pytest.mark.parametrize("views", [True, False])
@on_ranks(2)
def test_gradient_kept_over_a_step(rank, ddp_class, views):
    """As documented: a view has the next step's values; a copy keeps its own. No other rank's in either case."""
    ddp = trained(ddp_class, rank, gradient_as_bucket_view=views)
    kept = ddp.module.last.weight.grad
    ddp.zero_grad()
    step_on(ddp, rank, 2)
    assert_grads({"last.weight": kept}, {"last.weight": want(ddp, 2 if views else 1)["last.weight"]})


def test_gradients_outlive_module_and_peer(ddp_class):
    def work(rank):
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

    outcomes = run_outcomes(work, 2, needed_ranks=[0], timeout=20)
    assert outcomes[0].ok, outcomes[0].error


@on_ranks(2)
def test_weights_are_private(rank, ddp_class):
    """Only gradients are shared: an optimizer of one rank changes no other's weights."""
    ddp = trained(ddp_class, rank)
    before = [p.detach().clone() for p in ddp.parameters()]
    dist.barrier()
    if rank == 0:
        torch.optim.SGD(ddp.parameters(), lr=1.0).step()
    dist.barrier()
    assert all(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True)) == (rank == 1)


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
def test_forked_child_reads_and_leaves(rank, ddp_class):
    """The worker of a DataLoader, or whatever a rank forks: it may read, drop its copies and exit; nobody minds."""
    ddp = trained(ddp_class, rank)
    right = want(ddp, 1)

    def body():
        assert_grads(grads_of(ddp), right)
        ddp.zero_grad()
        ddp.module.first.weight.grad = torch.ones_like(ddp.module.first.weight)
        gc.collect()

    assert in_child(body)
    assert_grads(grads_of(ddp), right)
    for step in range(2, 4):
        ddp.zero_grad()
        step_on(ddp, rank, step)
        assert_grads(grads_of(ddp), want(ddp, step))


@on_ranks(2)
def test_forked_child_that_writes_is_seen_by_its_parent_alone(rank, ddp_class):
    """Shared mappings are inherited: what a child writes into `.grad` its parent sees. No other rank does."""
    ddp = trained(ddp_class, rank)
    right = want(ddp, 1)
    dist.barrier()
    if rank == 0:
        assert in_child(lambda: spoil(ddp))
        assert ddp.module.first.weight.grad.isnan().all()
    dist.barrier()
    if rank == 1:
        assert_grads(grads_of(ddp), right)


@on_ranks(2)
def test_forked_child_that_deletes_the_module(rank, ddp_class):
    """The transport's end in a child is not the end of the rank."""
    made = [trained(ddp_class, rank)]

    def body():
        made.clear()
        gc.collect()

    assert in_child(body)
    for step in range(2, 4):
        made[0].zero_grad()
        step_on(made[0], rank, step)
        assert_grads(grads_of(made[0]), want(made[0], step))
