"""Sums over shared memory are the same bit for bit: in each run, for every bucket plan, and as gloo's for two ranks."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import each, on_ranks
from tests.models import Mlp, assert_grads, batch, expected_grads, grads_of, loss_of, same_on_all_ranks, seeded, step_on

WIDTH = 100  # gradients of 0.2 to 0.5 MiB in fp64
CAPS_MB = (0.01, 0.1, 1, 25)
CROWD = 2 * len(os.sched_getaffinity(0)) + 1
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.beyond_torch("knows no shared memory")


def grads_with(cls, rank, dtype=torch.float64, **options):
    """After three steps."""
    ddp = cls(seeded(lambda: Mlp(WIDTH, dtype)), **options)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step, 5, WIDTH, dtype=dtype))).backward()
    return grads_of(ddp)


@on_ranks(2, 3)
def test_bucket_plan_changes_no_bit(rank, ddp_class, world_size):
    for dtype in each([torch.float64, torch.float32, torch.float16, torch.bfloat16]):
        if dtype is torch.float16 and world_size > 2:
            continue
        want = grads_with(ddp_class, rank, dtype, transport="shm")
        assert same_on_all_ranks(want.values())
        for cap_mb in CAPS_MB:
            grads = grads_with(ddp_class, rank, dtype, transport="shm", bucket_cap_mb=cap_mb)
            assert_grads(grads, want, rtol=0, what=f"cap {cap_mb}:")
        if world_size == 2:  # as torch: two terms have one order of summation, and halving them is exact
            assert_grads(want, grads_with(TorchDDP, rank, dtype), rtol=0)


@pytest.mark.rest_is_thorough("3")
@on_ranks(3, CROWD)
def test_five_runs_agree(rank, ddp_class):
    """Also with more ranks than processors, where others do a rank's work while it waits for one."""
    want = grads_with(ddp_class, rank, transport="shm", bucket_cap_mb=0.1)
    assert same_on_all_ranks(want.values())
    for run in range(4):
        grads = grads_with(ddp_class, rank, transport="shm", bucket_cap_mb=0.1)
        assert_grads(grads, want, rtol=0, what=f"run {run}:")


# As many as operations can be under way, and some more; of all kinds.
MANY = [numel for i in range(50) for numel in (3 + i, 3_000 + i, 9_000)]
# About the boundaries of the slot (8 KiB), of a chunk (64 KiB), and of shards, whose unit is 128 elements.
AT_BOUNDARIES = [base + more for base in (1, 128, 256, 2048, 16_384, 32_768) for more in (-1, 0, 1) if base + more]


class Many(torch.nn.Module):
    def __init__(self, numels=MANY, dtype=torch.float64):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(numel, dtype=dtype) for numel in numels)

    def forward(self, rank, step):
        return sum((weight * stamp(rank, step, i, weight.numel())).sum() for i, weight in enumerate(self.weights))


def stamp(rank, step, index, numel):
    return (rank + 3 * step + index + torch.arange(numel) % 5).double()


@on_ranks(2, 3)
def test_more_buckets_than_operations_in_flight_and_gradients_of_every_size(rank, ddp_class, world_size):
    for (numels, dtype), step in each([(MANY, torch.float64), (AT_BOUNDARIES, torch.float32)], range(3)):
        if step == 0:
            ddp = ddp_class(Many(numels, dtype), transport="shm", bucket_cap_mb=1e-6)
        ddp.zero_grad()
        ddp(rank, step).backward()
        for index, weight in enumerate(ddp.module.weights):
            want = sum(stamp(r, step, index, weight.numel()) for r in range(world_size)) / world_size
            exact = 1e-15 if dtype is torch.float64 else 1e-6
            torch.testing.assert_close(weight.grad.double(), want, rtol=exact, atol=0, msg=f"step {step}, {index}")


@on_ranks(2)
def test_accumulation_and_complex_numbers(rank, ddp_class):
    ddp = ddp_class(seeded(lambda: Mlp(8, torch.complex128)), transport="shm", bucket_cap_mb=0.001)

    def run(model, r):
        for step in range(2):
            loss_of(model(batch(r, step, dtype=torch.complex128))).backward()

    with ddp.no_sync():
        loss_of(ddp(batch(rank, 0, dtype=torch.complex128))).backward()
    loss_of(ddp(batch(rank, 1, dtype=torch.complex128))).backward()
    assert_grads(grads_of(ddp), expected_grads(ddp.module, run))


THREADED = """
    import os, sys, tempfile
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as TorchDDP
    from torchddp import DistributedDataParallel

    path, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    grads = []
    for cls, options in ((DistributedDataParallel, {"transport": "shm"}), (TorchDDP, {})):
        torch.manual_seed(0)
        # 19 MiB in one bucket: two threads share a rank's part of 9 MiB.
        ddp = cls(torch.nn.Linear(1600, 3000), bucket_cap_mb=100, **options)
        for step in range(3):
            ddp.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            ddp(torch.randn(4, 1600, generator=generator)).square().sum().backward()
        grads.append([p.grad.clone() for p in ddp.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), "gradients differ"
    assert torch.get_num_threads() == 2
    dist.barrier()
"""


def test_two_threads_a_rank(tmp_path):
    """In processes of their own: OpenMP does not survive a fork."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(THREADED), str(tmp_path / "store"), str(rank)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)


@on_ranks(3)
def test_one_rank_that_lags(rank, ddp_class):
    """The others do its sums for it; it finds them done."""
    ddp = ddp_class(seeded(Mlp), transport="shm", bucket_cap_mb=0.001)
    for step in range(6):
        ddp.zero_grad()
        if rank == step % 3:
            time.sleep(0.02)
        step_on(ddp, rank, step)
        want = expected_grads(ddp.module, lambda plain, r, s=step: step_on(plain, r, s))
        assert_grads(grads_of(ddp), want)
