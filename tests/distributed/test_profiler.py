"""`torchddp.profiler`, times in the logging data, and `record_profile` on real ranks."""

import itertools
import json
import time
from statistics import median, mode

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import assert_each_raises, each, gathered, on_ranks
from tests.models import linears
from torchddp import DDP
from torchddp.plan.record_profile import record_profile
from torchddp.profiler import monitor, profile, ranks
from torchddp.profiler.ranks import Clock
from torchddp.simulate.predict import model_error

AHEAD_NS = 3_000_000_000  # how far the clock of another host is ahead
SLEEP_S = 0.5  # a busy machine delays the other ranks less, in most steps


def model(count=4, **options):
    return DDP(linears(count, 16), bucket_cap_mb=0.001, **options)


def steps(ddp, count):
    for _ in range(count):
        ddp(torch.randn(2, 16)).sum().backward()


@on_ranks(2)
def test_torchs_profiler_shows_buckets_by_name_and_logging_times_add_up():
    for transport in each(["c10d", "shm"]):
        ddp = model(transport=transport)
        steps(ddp, 3)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            steps(ddp, 1)
        names = [event.name for event in recorded.events()]
        for index, bucket in enumerate(ddp.reducer.plan.buckets):
            first = ddp.session.specs[bucket.params[0]].name
            for what in ("launch", "wait"):
                start = f"torchddp.{what} bucket {index} ({bucket.nbytes} bytes: '{first}'"
                assert sum(name.startswith(start) for name in names) == 1, (start, names)
        data = ddp._get_ddp_logging_data()
        assert data["backward_comm_time"] == data["backward_comm_time_end"] - data["backward_comm_time_start"]
        assert data["backward_compute_time"] == data["backward_compute_time_end"] - data["backward_compute_time_start"]
        assert data["forward_compute_time"] == data["backward_compute_time_start"] - data["forward_compute_time_start"]
        assert data["exposed_comm_time"] == data["backward_comm_time_end"] - data["backward_compute_time_end"]
        assert data["backward_compute_comm_overlap_time"] <= data["backward_comm_time"]
        assert data["transport"] == transport


@on_ranks(3)
def test_a_rank_that_sleeps_in_backward_is_the_straggler(rank, world_size):
    ddp = model()
    steps(ddp, 3)
    if rank == 1:  # before layer 1's own gradients
        ddp.module[1].register_full_backward_pre_hook(lambda layer, grads: time.sleep(SLEEP_S))
    with profile(ddp) as recorded:
        steps(ddp, 5)
    merged = recorded.gather()
    assert [step.index for step in merged.steps] == [step.index for step in recorded.steps] == [4, 5, 6, 7, 8]
    assert max(range(world_size), key=merged.mean_waits_ns().__getitem__) == 1
    blamed = [step for step in merged.steps if step.straggler is not None and step.straggler.rank == 1]
    assert len(blamed) >= 3
    found = [step.straggler for step in blamed]
    for delay in ("wait_ns", "lost_ns"):
        assert median(getattr(straggler, delay) for straggler in found) / 1e9 > 0.5 * SLEEP_S, delay
    assert mode(straggler.where for straggler in found) == "backward"
    assert mode(merged.names[straggler.parameter or 0] for straggler in found) in ("1.weight", "1.bias")
    for step in blamed:
        waited = max(step.buckets, key=lambda bucket: bucket.wait_ns)
        assert waited.last_rank == 1 and waited.holder in waited.params
    assert any(merged.names[param].startswith("1.") for param in waited.params)
    assert "rank 1 was last in" in " ".join(recorded.report(merged=True).split())
    assert "straggler" not in recorded.report()


@on_ranks(2)
def test_each_step_is_complete():
    # Including steps that rebuild buckets.
    ddp = model()
    steps(ddp, 1)
    assert ddp.reducer.timeline() == []  # off by default
    ddp = model()
    with profile(ddp) as recorded:
        steps(ddp, 3)
    assert recorded.incomplete == 0 and recorded.dropped == 0
    assert min(ddp.reducer.get_backward_stats()) > 0
    assert recorded.names == tuple(name for name, _ in ddp.module.named_parameters())
    for step in recorded.steps:
        assert len(step.gradients) == 8
        assert sorted(param for bucket in step.buckets for param in bucket.params) == list(range(8))
        assert step.forward_begin_ns < step.backward_begin_ns <= step.compute_end_ns < step.backward_end_ns
        assert 0 <= step.overlap_ratio <= 1 and 0 < step.comm_ns
        for bucket in step.buckets:
            times = [bucket.first_ready_ns, bucket.last_ready_ns, bucket.packed_ns, bucket.launched_ns]
            times += [bucket.wait_begin_ns, bucket.done_ns]
            assert None not in times and times == sorted(times)
            assert bucket.holder in bucket.params
        # Reduction starts while gradients are still being computed.
        assert min(bucket.launched_ns for bucket in step.buckets) < step.compute_end_ns

    # The last steps are kept, and dropped ones are counted.
    with profile(ddp, steps=2) as recorded:
        steps(ddp, 9)
    assert [step.index for step in recorded.steps] == [11, 12]
    assert recorded.dropped > 0
    assert f"{recorded.dropped} events of earlier steps overwritten" in " ".join(recorded.report().split())

    # With a parameter without a gradient and a skipped bucket.
    ddp = model(2, find_unused_parameters=True, skip_all_reduce_unused_params=True)
    layers = ddp.module
    layers.forward = lambda inputs: layers[1](inputs)
    with profile(ddp) as recorded:
        steps(ddp, 3)
    for step in recorded.gather().steps:
        sent = {recorded.names[p] for bucket in step.buckets if bucket.last_rank is not None for p in bucket.params}
        assert sent == {"1.weight", "1.bias"}


@on_ranks(2)
def test_chrome_traces_of_one_rank_and_of_all(rank, tmp_path):
    ddp = model()
    with profile(ddp) as recorded:
        steps(ddp, 3)
    recorded.export_chrome_trace(tmp_path / "all.json", merged=True)
    recorded.export_chrome_trace(str(tmp_path / f"{rank}.json"))
    # Rank 0 has written the merged trace.
    for name, ranks_in_it in ((f"{rank}", {rank}), *[("all", {0, 1})] * (rank == 0)):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == ranks_in_it
        assert sum(event["name"] == "backward" for event in events) == 3 * len(ranks_in_it)


@on_ranks(2)
def test_profile_errors_and_the_end_of_a_profile():
    # An exception inside ends the profile.
    ddp = model()
    hooks = len(ddp._forward_hooks)
    with pytest.raises(KeyError), profile(ddp) as recorded:
        steps(ddp, 2)
        raise KeyError("from the training loop")
    assert len(ddp._forward_hooks) == hooks
    before = len(ddp.reducer.timeline())
    steps(ddp, 1)
    assert len(ddp.reducer.timeline()) == before  # off again
    assert len(recorded.steps) == 2

    # Invalid models are refused in one sentence.
    for wrong in (nn.Linear(2, 2), TorchDDP(nn.Linear(2, 2)), None):
        for start in (profile, lambda wrong: monitor(wrong, print)):
            with pytest.raises(TypeError, match=r"needs a torchddp\.DistributedDataParallel.*got [\w.]+$"):
                start(wrong).__enter__()
    with profile(ddp) as outer:
        assert_each_raises(
            (lambda: profile(ddp, steps=0).__enter__(), ValueError, "at least 1, got 0"),
            (lambda: monitor(ddp, print, every=0), ValueError, "at least 1, got 0"),
            (lambda: monitor(ddp, 3), TypeError, "callback"),
            (lambda: profile(ddp).__enter__(), RuntimeError, "profiled already"),
        )
        steps(ddp, 1)
    assert len(outer.steps) == 1  # the refused calls did not end it
    with profile(ddp) as empty:
        pass
    assert_each_raises((empty.report, ValueError, "no complete step"), (empty.gather, ValueError, "no complete step"))


@on_ranks(2)
def test_clocks_and_profiles_of_other_hosts(rank, monkeypatch):
    ddp = model()
    monkeypatch.setattr(ranks, "clock_identity", lambda: f"host {rank}")
    with profile(ddp) as recorded:
        steps(ddp, 2)
    merged = recorded.gather()
    uncertainty_ns = merged.clocks[1].uncertainty_ns
    assert merged.clocks[0] == Clock() and 0 < uncertainty_ns < AHEAD_NS
    assert abs(merged.clocks[1].offset_ns) <= uncertainty_ns  # the ranks share a clock
    assert "clocks of different hosts aligned" in recorded.report(merged=True)


@on_ranks(2)
def test_monitors():
    # A monitor is called after every n-th synchronized step.
    for every in each([1, 3]):
        ddp = model()
        told = []
        handle = monitor(ddp, lambda step, values, told=told: told.append(step), every=every)
        for index in range(7):
            with torch.no_grad():
                ddp(torch.randn(2, 16))
            if index % 2:
                with ddp.no_sync():
                    steps(ddp, 1)
            ddp(torch.randn(2, 16))  # without a backward
            steps(ddp, 1)
        steps(ddp, 1)  # the eighth step starts and reports the seventh
        assert told == list(range(every, 8, every))
        handle.close()  # which reports the eighth
        handle.close()
        steps(ddp, 2 * every)
        assert told == list(range(every, 9, every))

    # A monitor reports the step's times.
    ddp = model()
    told = []
    monitor(ddp, lambda step, values: told.append(values))
    ddp.module.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
    with profile(ddp) as recorded:
        steps(ddp, 4)
    steps(ddp, 1)
    assert len(told) == 4
    values, step = told[-1], recorded.steps[-1]
    assert values["ddp/buckets"] == len(step.buckets)
    assert values["ddp/bytes"] == sum(bucket.nbytes for bucket in step.buckets) >= 4 * 272 * 4
    # Two sources of the same numbers; the process may have been preempted between two clock readings.
    assert values["ddp/step_ms"] == pytest.approx(step.duration_ns / 1e6, rel=0.5)
    assert 0 < values["ddp/comm_ms"] < values["ddp/step_ms"]


@on_ranks(2)
def test_the_model_fits_a_small_step_with_overhead_and_a_late_rank(rank):
    ddp = DDP(linears(4, 16), transport="c10d")
    number = itertools.count()

    def step():
        # One rank is late in each step, before its forward starts.
        if next(number) % 2 == rank:
            time.sleep(SLEEP_S)
        ddp(torch.ones(2, 16)).sum().backward()

    profile = record_profile(ddp, step, steps=4)
    assert next(number) >= 4 + 2 * 4
    assert profile.overhead_s > 0.8 * SLEEP_S, profile
    error = model_error(profile)
    assert error is not None and abs(error) < 0.4, profile
    assert gathered(profile.to_dict()) == [profile.to_dict()] * 2

    # More of short steps are recorded.
    ddp = DDP(nn.Linear(4, 4))
    number = itertools.count()

    def short_step():
        next(number)
        ddp(torch.ones(1, 4)).sum().backward()

    record_profile(ddp, short_step, steps=1)
    assert next(number) > 4 + 2 * 4
    with pytest.raises(ValueError, match="steps must be at least 1"):
        record_profile(ddp, short_step, steps=0)
