"""Bytes counted by a model and by the kernel, between two network namespaces."""

import pytest
import torch
import torch.distributed as dist

import torchddp
from benchmarks.hosts import quiet_count, two_hosts
from tests.models import linears
from torchddp.harness.launch import RankJob, launch


@pytest.mark.rest_is_thorough("2")
@pytest.mark.slow
@pytest.mark.usefixtures("two_namespaces")
@pytest.mark.beyond_torch("torch counts no bytes")
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_counted_bytes_match_the_interface(ranks_per_host):
    size = 2 * ranks_per_host
    with two_hosts(1_000_000_000, size) as place:
        found = launch(RankJob("traffic", both_counts, (), size), lambda what, done, total: None, place=place)
    for first in range(0, len(found), ranks_per_host):
        ranks = found[first : first + ranks_per_host]
        for name in ranks[0]:
            counted, sent = sum(rank[name]["counted"] for rank in ranks), ranks[0][name]["sent"]
            # The interface also counts headers and acknowledgements.
            assert 0.95 < sent / counted < 1.10, (name, counted, sent)


STEPS = 4


def measure(route, **options):
    """Bytes of one step by `model.traffic()` and by this host's interface."""
    ddp = torchddp.DistributedDataParallel(linears(4, 512), **options)

    def step():
        ddp(torch.ones(2, 512)).sum().backward()

    for _ in range(2):  # buckets are rebuilt
        step()
    before = quiet_count()
    for _ in range(STEPS):
        step()
    sent = (quiet_count() - before) / STEPS
    return {"counted": ddp.traffic()[route].wire_bytes or 0, "sent": sent}


def both_counts(report):
    """Every rank's bytes by route."""
    world_size = dist.get_world_size()
    if world_size == 2:
        mine = {"c10d": measure("c10d", transport="c10d")}
    else:  # ranks of a host share memory
        narrow = measure("outer", transport="shm", precision=torchddp.Precision(wire=torch.bfloat16))
        mine = {"outer": measure("outer", transport="shm"), "narrow": narrow}
    by_rank = [None] * world_size
    dist.all_gather_object(by_rank, mine)
    return by_rank
