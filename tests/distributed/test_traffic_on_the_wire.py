"""Bytes counted by a model and by the kernel, between two network namespaces."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from benchmarks.two_hosts.launch import STORE_PORT, worker_environment
from benchmarks.two_hosts.network import inside, two_hosts
from benchmarks.two_hosts.traffic import quiet_count
from tests.programs import ROOT, run_together


def run_on(hosts, ranks_per_host):
    """Run ranks on the hosts and return their results."""
    size, init_method = len(hosts) * ranks_per_host, f"tcp://{hosts[0].address}:{STORE_PORT}"
    command = [sys.executable, "-m", "tests.distributed.test_traffic_on_the_wire"]
    commands = [
        inside(hosts[rank // ranks_per_host].namespace, [*command, str(rank), str(size), init_method])
        for rank in range(size)
    ]
    ranks = run_together(commands, [{**worker_environment(), "PYTHONPATH": str(ROOT)}] * size, 500)
    assert [rank.returncode for rank in ranks] == [0] * size, "".join(rank.stderr for rank in ranks)
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]


@pytest.mark.rest_is_thorough("2")
@pytest.mark.slow
@pytest.mark.usefixtures("two_namespaces")
@pytest.mark.beyond_torch("torch counts no bytes")
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_counted_bytes_match_the_interface(ranks_per_host):
    with two_hosts(1_000_000_000) as hosts:
        found = run_on(hosts, ranks_per_host)
    for first in range(0, len(found), ranks_per_host):
        ranks = found[first : first + ranks_per_host]
        for name in ranks[0]:
            counted, sent = sum(rank[name]["counted"] for rank in ranks), ranks[0][name]["sent"]
            # The interface also counts headers and acknowledgements.
            assert 0.95 < sent / counted < 1.10, (name, counted, sent)


STEPS = 4


def measure(route, **options):
    """Bytes of one step by `model.traffic()` and by this host's interface."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    ddp = torchddp.DistributedDataParallel(layers, **options)

    def step():
        ddp(torch.ones(2, 512)).sum().backward()

    for _ in range(2):  # buckets are rebuilt
        step()
    before = quiet_count()
    for _ in range(STEPS):
        step()
    sent = (quiet_count() - before) / STEPS
    return {"counted": ddp.traffic()[route].wire_bytes or 0, "sent": sent}


def main(rank, world_size, init_method):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    if world_size == 2:
        found = {"c10d": measure("c10d", transport="c10d")}
    else:  # ranks of a host share memory
        narrow = measure("outer", transport="shm", wire_dtype=torch.bfloat16)
        found = {"outer": measure("outer", transport="shm"), "narrow": narrow}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
