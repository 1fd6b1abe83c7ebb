"""The timeline of a step, and the times that the logging fields are filled from."""

import pytest
import torch
from torch import nn

from tests.harness import on_ranks
from torchddp import DistributedDataParallel


def _layers(count: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))


@on_ranks(2)
def test_events_of_a_step_are_complete_and_in_order():
    ddp = DistributedDataParallel(_layers(), bucket_cap_mb=0.001)
    for _ in range(2):
        ddp(torch.randn(2, 16)).sum().backward()
    assert ddp.reducer.timeline() == []  # off by default
    ddp.reducer.enable_timeline(1000)
    ddp(torch.randn(2, 16)).sum().backward()
    ddp.reducer.disable_timeline()
    ddp(torch.randn(2, 16)).sum().backward()
    events = ddp.reducer.timeline()
    times = [event.time_ns for event in events]
    assert times == sorted(times)
    kinds = [event.kind for event in events]
    buckets = len(ddp.reducer.plan)
    assert buckets > 1
    assert kinds[0] == "forward_begin" and kinds[-1] == "backward_end"
    assert kinds.count("grad_ready") == 8
    for kind in ("packed", "launched", "wait_begin", "done"):
        assert [event.id for event in events if event.kind == kind] == list(range(buckets)), kind
    # Reduction starts while gradients are still being computed.
    assert kinds.index("launched") < max(i for i, kind in enumerate(kinds) if kind == "grad_ready")
    assert min(ddp.reducer.get_backward_stats()) > 0


@on_ranks(1)
def test_the_ring_keeps_the_last_events_and_counts_the_others():
    ddp = DistributedDataParallel(_layers())
    ddp.reducer.enable_timeline(10)
    for _ in range(3):
        ddp(torch.randn(2, 16)).sum().backward()
    events = ddp.reducer.timeline()
    assert len(events) == 10 and events[-1].kind == "backward_end"
    assert ddp.reducer.timeline_dropped() > 0


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@on_ranks(2)
def test_torchs_profiler_shows_buckets_by_name(transport):
    ddp = DistributedDataParallel(_layers(), bucket_cap_mb=0.001, transport=transport)
    for _ in range(2):
        ddp(torch.randn(2, 16)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        ddp(torch.randn(2, 16)).sum().backward()
    names = [event.name for event in recorded.events()]
    for index, bucket in enumerate(ddp.reducer.plan.buckets):
        first = ddp.session.specs[bucket.params[0]].name
        for what in ("launch", "wait"):
            start = f"torchddp.{what} bucket {index} ({bucket.nbytes} bytes: '{first}'"
            assert sum(name.startswith(start) for name in names) == 1, (start, names)


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@on_ranks(2)
def test_logging_times_add_up(transport):
    ddp = DistributedDataParallel(_layers(), transport=transport)
    for _ in range(4):
        ddp(torch.randn(2, 16)).sum().backward()
    data = ddp._get_ddp_logging_data()
    assert data["backward_comm_time"] == data["backward_comm_time_end"] - data["backward_comm_time_start"]
    assert data["backward_compute_time"] == data["backward_compute_time_end"] - data["backward_compute_time_start"]
    assert data["forward_compute_time"] == data["backward_compute_time_start"] - data["forward_compute_time_start"]
    assert data["exposed_comm_time"] == data["backward_comm_time_end"] - data["backward_compute_time_end"]
    assert data["backward_compute_comm_overlap_time"] <= data["backward_comm_time"]
    assert data["transport"] == transport
