"""Worker side: bytes that each variant's steps send over the slow link, as the kernel counts them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.two_hosts.network import RANKS_PER_HOST, tx_bytes_path
from torchddp.bench.cases import Job
from torchddp.bench.timing import Runner
from torchddp.harness.models import make_batch
from torchddp.harness.variants import Role

# Consecutive steps of one variant, so that the barriers around them (about a kilobyte) do not matter.
COUNTED_STEPS = 3
# Lets the last acknowledgements leave.
SETTLE_S = 0.02


def quiet_count() -> int:
    """Bytes this host has sent, read while no rank sends."""
    dist.barrier()
    time.sleep(SETTLE_S)
    count = int(Path(tx_bytes_path()).read_text())
    dist.barrier()
    return count


def sent_bytes(job: Job, model_name: str, runners: Sequence[Runner]) -> list[list[float]]:
    """Bytes sent over the link in one step, [host][variant]. The same on every rank."""
    batch = make_batch(model_name, job.seed, dist.get_rank(), 0)
    mine = []
    for runner in runners:
        before = quiet_count()
        for _ in range(COUNTED_STEPS):
            runner.step(batch)
        mine.append((quiet_count() - before) / COUNTED_STEPS)
    by_rank: list[Any] = [None] * job.world_size
    dist.all_gather_object(by_rank, mine)
    return by_rank[::RANKS_PER_HOST]


def transport_of(runners: Sequence[Runner]) -> str | None:
    """The transport that the class under test reports; None if it reports none."""
    ours = next(runner.module for runner in runners if runner.variant.role is Role.OURS)
    if not isinstance(ours, nn.parallel.DistributedDataParallel):
        return None
    return ours._get_ddp_logging_data().get("transport")
