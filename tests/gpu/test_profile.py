"""What the profiler sees of a step with one rank: few kernels, and collectives that start before backward is over."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.gpu import trace
from tests.models import seeded
from torchddp import DistributedDataParallel
from torchddp.harness.networks import ManySmallTensors

STEPS = 3


def work_of(module, x):
    """What the device does for a step, once nothing is a first time any more."""

    def step():
        module.zero_grad(set_to_none=True)
        module(x).backward()

    for _ in range(STEPS):
        step()
    counts = trace.count(trace.record(lambda: [step() for _ in range(STEPS)]), STEPS)
    return counts.kernels + counts.copies + counts.fills


@pytest.mark.profiler
def test_a_thousand_gradients_take_a_few_launches(gpu, record_property):
    """torch's class launches one kernel a gradient."""
    torch.use_deterministic_algorithms(False)  # fills new memory, which is one more kernel for each
    try:
        model = seeded(ManySmallTensors).to(gpu)
        x = torch.randn(64, device=gpu)
        bare = work_of(copy.deepcopy(model), x)
        theirs = work_of(TorchDDP(copy.deepcopy(model), device_ids=[0]), x) - bare
        ours = work_of(DistributedDataParallel(copy.deepcopy(model), device_ids=[0]), x) - bare
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
    record_property("kernels_of_the_bare_model", bare)
    record_property("kernels_added_by_torch", theirs)
    record_property("kernels_added_by_torchddp", ours)
    assert bare > 0, "the profiler has recorded no kernel"
    assert ours <= theirs / 10, f"ours adds {ours:g} launches a step, torch's {theirs:g}"


@pytest.mark.profiler
def test_nothing_of_a_bucket_waits_for_the_end_of_backward(gpu):
    """On the device: what is ours begins while gradients are still computed, collectives on a stream of their own."""
    width = 4096
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).to(gpu)
    ddp = DistributedDataParallel(model, bucket_cap_mb=width * width * 2 / 2**20)
    x = torch.randn(width, width, device=gpu)

    def step():
        ddp.zero_grad(set_to_none=True)
        ddp(x).square().mean().backward()

    for _ in range(3):
        step()
    events = trace.record(step)
    computation = [event for event in events if trace.is_computation(event)]
    ours = [event for event in events if "torchddp" in event.name or trace.is_collective(event)]
    assert computation, "the profiler has recorded no kernel"
    assert ours, f"nothing of ours among {sorted({event.name for event in events})}"
    end_us = max(event.end_us for event in computation)
    early = sum(event.start_us < end_us for event in ours)
    assert early >= len(ours) // 2, f"{early} of {len(ours)} began before the last gradient was there"
    found = trace.overlap(events)
    assert found.on_their_own_stream == found.collectives
