"""Ranks that share memory and stop, leave, raise or die: the others name the rank, never hang, and can continue."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from benchmarks.chaos.leaks import holders_of, segments_of
from tests.harness import on_ranks, run_ranks
from tests.models import Mlp, assert_grads, batch, grads_of, local_grads, loss_of, mean_grads, seeded, step_on
from tests.unit.helpers import wait_until

LIMIT_S = 5.0  # timeout of an operation, in tests that wait for it; a rank that runs comes in time
STEPS_BEFORE = 2  # buckets are rebuilt in the second step

pytestmark = pytest.mark.beyond_torch("knows no shared memory")


def wrap(ddp_class, model=None, **options):
    """Wrap the model with three buckets in shared memory."""
    return ddp_class(model or seeded(Mlp), transport="shm", bucket_cap_mb=0.001, **options)


def assert_steps_of(ddp, rank, ranks, steps=1, run=step_on):
    """Assert that the steps' gradients are means over these ranks."""
    for step in range(steps):
        ddp.zero_grad()
        run(ddp, rank, step)
        want = mean_grads(local_grads(ddp.module, lambda m, r=r, s=step: run(m, r, s)) for r in ranks)
        assert_grads(grads_of(ddp), want, what=f"step {step}:")


def trained(ddp_class, rank, **options):
    ddp = wrap(ddp_class, **options)
    for step in range(STEPS_BEFORE):
        step_on(ddp, rank, step)
    return ddp


def error_of(train):
    """(class names, text) of the error that `train` raises."""
    with pytest.raises(RuntimeError) as caught:
        train()
    return [c.__name__ for c in type(caught.value).__mro__], str(caught.value)


def error_of_steps(ddp, rank, steps=3):
    """The error of a few steps: a rank may finish a step to which its peers have contributed."""
    return error_of(lambda: [step_on(ddp, rank, STEPS_BEFORE + step) for step in range(steps)])


def assert_names(told, culprit):
    types, text = told
    assert "TransportError" in types, f"{types}: {text}"
    assert re.search(rf"rank {culprit}\b", text), f"rank {culprit} is not named: {text}"


def stop_until(condition: Callable[[], bool]):
    """SIGSTOP this process; a child continues it once the condition holds."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        wait_until(condition)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)
    os.waitpid(child, 0)


@on_ranks(3)
def test_all_ranks_name_a_stopped_rank_which_raises_when_it_wakes(ddp_class, rank, tmp_path):
    """Also a rank that started to wait later, and sees another give up first."""
    ddp = trained(ddp_class, rank, timeout=timedelta(seconds=LIMIT_S))
    if rank == 1:
        stop_until(lambda: len(list(tmp_path.iterdir())) == 2)
        return assert_names(error_of_steps(ddp, rank), "[02]")
    time.sleep(0.4 * LIMIT_S if rank == 2 else 0)
    told = error_of_steps(ddp, rank)
    (tmp_path / f"rank {rank} has raised").touch()
    assert_names(told, 1)
    return None


def test_death_of_a_rank_whose_child_lives_on(ddp_class, tmp_path):
    """A forked child, such as a DataLoader worker, keeps its parent's sockets open and its memory mapped."""
    child_path = tmp_path / "child"

    def work(rank):
        ddp = trained(ddp_class, rank)
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(1000)
                os._exit(0)
            child_path.write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        told = error_of_steps(ddp, rank, steps=1)
        assert int(child_path.read_text()) in holders_of(segments_of()), "the child lacks the socket or the memory"
        return told

    try:
        found = run_ranks(work, 3, needed_ranks=[0, 2])[::2]
        for told in found:
            assert_names(told, 1)
        # The other may hear of it from the rank that noticed first: "rank 0 gave up waiting for it".
        assert any(re.search("rank 1 (died|is gone)", told[1]) for told in found), found
    finally:
        os.kill(int(child_path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_survivors_continue_in_a_new_group(ddp_class, options):
    survivors = [0, 2, 3]

    def work(rank):
        ddp = trained(ddp_class, rank, **options)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        told = error_of_steps(ddp, rank, steps=1)
        ddp._update_process_group(dist.new_group(survivors, use_local_synchronization=True))
        assert ddp.reducer.transport_name == "shm"
        assert_steps_of(ddp, rank, survivors, steps=3)
        return told, segments_of()

    found = run_ranks(work, 4, needed_ranks=survivors)
    segments = set()
    for told, mapped in (found[rank] for rank in survivors):
        assert_names(told, 1)
        segments |= mapped
    assert segments and not holders_of(segments)


@on_ranks(3)
def test_nothing_is_mapped_once_model_and_gradients_are_gone(ddp_class, rank):
    ddp = trained(ddp_class, rank)
    assert len(segments_of()) == 3
    held = ddp.module.first.weight.grad
    ddp.zero_grad()
    del ddp
    assert len(segments_of()) == 1
    kept = held.clone()
    assert torch.equal(held, kept)
    del held
    assert not segments_of()


@on_ranks(3)
def test_late_writes_of_a_stopped_rank_reach_no_rank(ddp_class, rank, tmp_path):
    """It wakes up in the middle of an old sum, while the others train without it."""
    peers = [0, 2]
    width = 128  # gradients of several chunks, which any rank may sum

    def train(ddp, rank, step):
        loss_of(ddp(batch(rank, step, 5, width))).backward()

    ddp = ddp_class(seeded(lambda: Mlp(width)), transport="shm", timeout=timedelta(seconds=LIMIT_S))
    if rank == 1:
        threading.Timer(0.1, stop_until, [(tmp_path / "peers train").exists]).start()
    types, text = error_of(lambda: [train(ddp, rank, step) for step in range(1_000_000)])
    assert "TransportError" in types, text
    if rank == 1:
        return (tmp_path / "awake").touch()
    group = dist.new_group(peers, use_local_synchronization=True)
    ddp._update_process_group(group)
    enough = torch.zeros(())
    while enough.item() == 0:
        assert_steps_of(ddp, rank, peers, run=train)
        (tmp_path / "peers train").touch()
        enough.fill_((tmp_path / "awake").exists())
        dist.all_reduce(enough, group=group)
    return None
