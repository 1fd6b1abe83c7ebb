"""A rank's memory under ShardedDataParallel: over shared memory no more than through the process group."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import run_ranks, status_bytes
from torchddp.optim import OSS

pytestmark = pytest.mark.usefixtures("cheap_messages")

M_MMAP_THRESHOLD = -3  # glibc's constant for mallopt
MIB = 2**20
RANKS, LAYERS, WIDTH = 4, 12, 768  # three layers of 2.25 MiB for each rank
# A bucket through gloo, which is also what is kept over shared memory for other ranks' gradients; a segment's header.
MORE_MIB = 8 + 1


def _resident():
    """This process's anonymous memory, and its part of the shared. (A part of what it has from its parent would change
    with the number of processes that have it, too.)
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory counts as long as it is resident
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (shared,) = [1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:")]
    return status_bytes("RssAnon") + shared


def _in_excess_of_the_model(rank, transport):
    """Resident bytes between backward and update, and the peak of the step.

    In that step the last rank is late, so the others hold all of their gradients until it comes.
    """
    # Large blocks are mapped from and returned to the system, so that resident memory follows them.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 2)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    x = torch.randn(2, WIDTH, requires_grad=True)
    gc.collect()
    resident, peak = _resident(), status_bytes("RssAnon") + status_bytes("RssShmem")
    optimizer = OSS(net.parameters(), torch.optim.AdamW, lr=0.01)
    model = torchddp.ShardedDataParallel(net, optimizer, transport=transport)
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        if step == 2:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
            x.register_hook(lambda _: store.set(f"ahead/{rank}", ""))  # the last gradient
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step == 2 and rank == RANKS - 1:
            store.wait([f"ahead/{other}" for other in range(RANKS - 1)])
        loss.backward()
        if step == 2:
            dist.barrier()  # a page counts in part for each process that has mapped it
            resident = _resident() - resident
            dist.barrier()
        optimizer.step()
    peak = status_bytes("VmHWM") - status_bytes("RssFile") - peak
    assert model.reducer.transport.name == transport
    return resident, peak


def test_shared_memory_takes_no_more_than_the_process_group():
    most = {}
    for transport in ("c10d", "shm"):
        ranks = run_ranks(_in_excess_of_the_model, RANKS, transport)
        most[transport] = [max(of_rank) / MIB for of_rank in zip(*ranks, strict=True)]
    print("MiB of the rank with most, between backward and update, and at the peak:", most)
    for mine, theirs in zip(most["shm"], most["c10d"], strict=True):
        assert mine <= theirs + MORE_MIB, most
