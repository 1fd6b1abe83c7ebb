"""Bucket sizes over shared memory follow the measured cost of a message, measured once and equal on all ranks."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import gathered, on_ranks
from tests.models import linears
from torchddp import DistributedDataParallel
from torchddp.ddp import bucket_sizes
from torchddp.ddp.bucket_sizes import default_sizes
from torchddp.transport import message_cost, select
from torchddp.transport.message_cost import MessageLine, NoRoomError, measure_line

MIB = 1024 * 1024
CHEAP, DEAR = MessageLine(0.0, 1e-9), MessageLine(1.0, 1e-9)
WIDTH = 256
layers = partial(linears, 12, WIDTH)


def count_calls(monkeypatch, line=None):
    """Count measurements in this process from now on; they return `line`, or the real cost."""
    measured = mock.Mock(return_value=line, side_effect=measure_line if line is None else None)
    monkeypatch.setattr(bucket_sizes, "measure_line", measured)
    return measured


def gradients(ddp, rank):
    torch.manual_seed(rank)
    ddp(torch.randn(4, WIDTH)).square().sum().backward()
    return [p.grad.clone() for p in ddp.parameters()]


@on_ranks(2, 3, 4)
def test_a_group_is_measured_once_and_by_rank_0(rank, monkeypatch, world_size):
    calls = count_calls(monkeypatch)
    ddp = DistributedDataParallel(layers(), transport="shm")
    (cap,) = ddp.session.bucket_caps_bytes
    assert cap in {*(MIB << step for step in range(5)), 25 * MIB} and calls.call_count == 1
    logged = ddp._get_ddp_logging_data()
    assert logged["bucket_caps_bytes"] == str(cap) and logged["bucket_cap_bytes"] == 25 * MIB
    gradients(ddp, rank)
    sizes = (cap, [bucket.nbytes for bucket in ddp.reducer.plan.buckets])
    assert gathered(sizes) == [sizes] * world_size
    if rank > 0:
        bucket_sizes._lines[dist.group.WORLD] = DEAR  # not used
    if rank == world_size - 1:
        bucket_sizes._lines.clear()  # not missed
    second = DistributedDataParallel(layers(), transport="shm").session
    assert calls.call_count == 1 and second.bucket_caps_bytes == [cap]
    DistributedDataParallel(layers(), transport="shm", process_group=dist.new_group(range(world_size)))
    assert calls.call_count == 2


@on_ranks(3)
def test_expensive_messages_make_fewer_buckets_with_the_same_sums(rank, monkeypatch):
    found = []
    for line in (CHEAP, DEAR):
        count_calls(monkeypatch, line)
        bucket_sizes._lines.clear()
        ddp = DistributedDataParallel(layers(), transport="shm")
        found.append((gradients(ddp, rank), ddp.session.bucket_caps_bytes, len(ddp.reducer.plan)))
    (small, small_caps, many), (large, large_caps, few) = found
    assert (small_caps, large_caps) == ([MIB], [25 * MIB])
    assert (many, few) == (13, 1)  # one bucket per weight, and one for the biases
    assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))


@on_ranks(2)
def test_costs_are_not_measured_if_sizes_do_not_depend_on_them(rank, monkeypatch):
    calls = count_calls(monkeypatch)
    for count, arguments, caps in (
        (3, {}, [MIB]),  # 0.75 MiB: one bucket at any cost
        (12, {"bucket_cap_mb": 0.5}, [MIB // 2]),
        (12, {"bucket_cap_mb_list": [1, 2]}, [MIB, 2 * MIB]),
        (12, {"transport": "c10d"}, [MIB, 8 * MIB]),
    ):
        ddp = DistributedDataParallel(linears(count, WIDTH), **{"transport": "shm", **arguments})
        assert not calls.called and ddp.session.bucket_caps_bytes == caps, arguments


@on_ranks(3)
def test_without_memory_on_one_rank_all_use_the_smallest_sizes(rank, monkeypatch):
    monkeypatch.setattr(message_cost, "_LAST_SHARED_BYTES", 64 * MIB)
    monkeypatch.setenv("TORCHDDP_SHM_LIMIT_MB", "32" if rank == 1 else "128")
    transport = select.open_transport("shm", dist.group.WORLD)
    with pytest.raises(NoRoomError, match="67108864 bytes"):
        measure_line(transport, torch.device("cpu"), dist.default_pg_timeout, 0.001)
    assert default_sizes(list(layers().parameters()), transport, dist.group.WORLD) == ([MIB], MIB // 4)
    assert not bucket_sizes._lines
