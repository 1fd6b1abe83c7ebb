"""Functions of two ranks that share one GPU, run by name in fresh processes, because CUDA does not survive a fork."""

import datetime
import os
import re
import signal
import time
from functools import partial

import torch
import torch.distributed as dist

from benchmarks import trace
from tests.gpu.cases import names, run_case
from tests.gpu.device import chosen_device, make_deterministic
from tests.gpu.overlap import Overlap, overlap
from tests.harness import attempt, gathered
from tests.models import loss_of
from tests.whole_buckets import large_from
from torchddp import _C, DistributedDataParallel

NOT_RUN = "not run: an earlier case failed, and left the ranks at different places"
FAULT_TIMEOUT_S = 5.0


def run_all_cases(
    rank: int, transport: str, want_nccl: tuple[int, ...] = (), limit_bytes: int = 0
) -> dict[str, str | None]:
    """Run every case; by name, None or this rank's error. Gradients of `limit_bytes` or more count as large."""
    device = chosen_device()
    make_deterministic(device)
    if want_nccl and loaded_nccl() < want_nccl:
        raise RuntimeError(f"NCCL {loaded_nccl()} is loaded, {want_nccl} or newer was meant to be")
    outcomes: dict[str, str | None] = dict.fromkeys(names(device), NOT_RUN)
    for name in outcomes:
        ours = partial(DistributedDataParallel, transport=transport)
        with large_from(limit_bytes):
            _, outcomes[name] = attempt(run_case, name, device, ours)
        if lost_step(gathered(outcomes[name])):
            break
    return outcomes


def loaded_nccl() -> tuple[int, ...]:
    """The NCCL version at run time; torch.cuda.nccl.version() is the one that torch was compiled with."""
    version = (_C.nccl_versions() or (0, 0))[0]
    return version // 10000, version // 100 % 100, version % 100


def error_type(error: str | None) -> str:
    """The exception type at the end of a traceback; empty if there was no error."""
    found = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception))\b", error or "", re.MULTILINE)
    return found[-1] if found else (error or "")


def lost_step(errors: list[str | None]) -> bool:
    """Whether the ranks may now be at different points of the program.

    They are not if all raised the same error. Failed comparisons are harmless: they come after all collectives.
    """
    types = {error_type(error) for error in errors}
    return len(types - {"AssertionError", ""}) > 0 and len(types) > 1


def assert_same_as_torch(outcomes: list[dict[str, str | None]], name: str) -> None:
    errors = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(outcomes) if of_rank[name] is not None]
    assert not errors, "\n".join(errors)


def overlap_of_a_step(rank: int, transport: str, layers: int = 8, width: int = 4096) -> Overlap:
    """How the collectives of a step overlap its computation, with a bucket per layer."""
    device = chosen_device()
    make_deterministic(device)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
    bucket_mb = width * width * 2 / 2**20  # half a layer's weight: no bucket holds two
    ddp = DistributedDataParallel(model, transport=transport, bucket_cap_mb=bucket_mb)
    inputs = torch.randn(width, width, device=device)

    def step() -> None:
        ddp.zero_grad(set_to_none=True)
        loss_of(ddp(inputs)).backward()

    for _ in range(3):
        step()
    return overlap(trace.record(step))


def torchs_communicator_after_a_step(rank: int, transport: str) -> int:
    """The address of torch's own communicator for a group that has only NCCL; 0: it was never needed."""
    device = chosen_device()
    group = dist.new_group(backend="nccl")
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4).to(device), transport=transport, process_group=group)
    loss_of(ddp(torch.ones(2, 4, device=device))).backward()
    settle(device)
    return int(group._get_backend(device)._comm_ptr())


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train_until_fault(rank: int, transport: str, fault: str) -> tuple[list[str], str, float]:
    """Rank 1 stops after two steps; return the MRO and text of rank 0's error, and the seconds it took."""
    device = chosen_device()
    make_deterministic(device)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).to(device)
    limit = datetime.timedelta(seconds=FAULT_TIMEOUT_S)
    ddp = DistributedDataParallel(model, transport=transport, bucket_cap_mb=0.01, timeout=limit)
    inputs = torch.randn(8, 64, device=device)
    for _ in range(2):
        ddp.zero_grad()
        loss_of(ddp(inputs)).backward()
    settle(device)
    if rank == 1:
        if fault == "late":
            time.sleep(10 * FAULT_TIMEOUT_S)
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    started_s = time.monotonic()
    try:
        for _ in range(3):  # an asynchronous error may surface a step later
            ddp.zero_grad()
            loss_of(ddp(inputs)).backward()
            settle(device)
    except Exception as error:
        seconds = time.monotonic() - started_s
        # The device is usable again: no kernel of the aborted collective is still spinning on it.
        assert torch.ones(3, device=device).sum().item() == 3
        return [cls.__name__ for cls in type(error).__mro__], str(error), seconds
    return [], "no error", time.monotonic() - started_s
