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

from tests.harness import on_ranks, run_ranks
from tests.models import Mlp, assert_grads, batch, expected_grads, grads_of, loss_of, same_on_all_ranks, seeded, step_on

WIDTH = 100  # gradients of 0.2 to 0.5 MiB in fp64
CAPS_MB = (0.01, 0.1, 1, 25)
CROWD = 2 * len(os.sched_getaffinity(0)) + 1
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.beyond_torch("knows no shared memory")


def steps(ddp, rank, dtype=torch.float64, count=3):
    for step in range(count):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step, 5, WIDTH, dtype=dtype))).backward()
    return grads_of(ddp)


def grads_with(ddp_class, world_size, cap_mb=None, dtype=torch.float64):
    """Rank 0's; the same on all."""

    def work(rank):
        ddp = ddp_class(seeded(lambda: Mlp(WIDTH, dtype)), transport="shm", bucket_cap_mb=cap_mb)
        grads = steps(ddp, rank, dtype)
        assert same_on_all_ranks(grads.values())
        return grads

    return run_ranks(work, world_size, timeout=60)[0]


@pytest.mark.rest_is_thorough("*float32-3", "*bfloat16-2", "*float64-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bucket_plan_changes_no_bit(ddp_class, world_size, dtype):
    want = grads_with(ddp_class, world_size, dtype=dtype)
    for cap_mb in CAPS_MB:
        assert_grads(grads_with(ddp_class, world_size, cap_mb, dtype), want, rtol=0, what=f"cap {cap_mb}:")


@pytest.mark.rest_is_thorough("3")
@pytest.mark.parametrize("world_size", [3, CROWD])
def test_five_runs_agree(ddp_class, world_size):
    """Also with more ranks than processors, where others do a rank's work while it waits for one."""
    want = grads_with(ddp_class, world_size, 0.1)
    for run in range(4):
        assert_grads(grads_with(ddp_class, world_size, 0.1), want, rtol=0, what=f"run {run}:")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@on_ranks(2)
def test_two_ranks_get_what_torch_gets(rank, ddp_class, dtype):
    """Two terms have one order of summation, and halving them is exact."""
    pair = []
    for cls, options in ((ddp_class, {"transport": "shm"}), (TorchDDP, {})):
        pair.append(steps(cls(seeded(lambda: Mlp(WIDTH, dtype)), **options), rank, dtype))
    assert_grads(*pair, rtol=0)


class Many(torch.nn.Module):
    """As many parameters as operations can be under way, and some more; sizes of all kinds."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.ones(numel, dtype=torch.float64) for i in range(50) for numel in (3 + i, 3_000 + i, 9_000)
        )

    def forward(self, rank, step):
        return sum((weight * stamp(rank, step, i, weight.numel())).sum() for i, weight in enumerate(self.weights))


def stamp(rank, step, index, numel):
    return (rank + 3 * step + index + torch.arange(numel) % 5).double()


@on_ranks(2, 3)
def test_more_buckets_than_operations_in_flight(rank, ddp_class, world_size):
    ddp = ddp_class(Many(), transport="shm", bucket_cap_mb=1e-6)
    for step in range(3):
        ddp.zero_grad()
        ddp(rank, step).backward()
        for index, weight in enumerate(ddp.module.weights):
            want = sum(stamp(r, step, index, weight.numel()) for r in range(world_size)) / world_size
            torch.testing.assert_close(weight.grad, want, rtol=1e-15, atol=0, msg=f"step {step}, {index}")


@on_ranks(3)
def test_gradients_of_every_size_about_a_boundary(rank, ddp_class):
    """Of the slot (8 KiB), of a chunk (64 KiB), and of shards, whose unit is 128 elements."""
    numels = [base + more for base in (1, 128, 256, 2048, 16_384, 32_768) for more in (-1, 0, 1) if base + more]

    class Sizes(Many):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.ones(n) for n in numels)

    ddp = ddp_class(Sizes(), transport="shm", bucket_cap_mb=1e-6)
    for step in range(2):
        ddp.zero_grad()
        ddp(rank, step).backward()
        for index, weight in enumerate(ddp.module.weights):
            want = sum(stamp(r, step, index, weight.numel()) for r in range(3)) / 3
            torch.testing.assert_close(weight.grad.double(), want, rtol=1e-6, atol=0)


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
