"""A profile of a step on one rank: few kernels, and collectives that start before backward ends."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks import trace
from tests.gpu.overlap import is_computation, overlap
from tests.gpu.test_graph import halving
from tests.models import seeded
from torchddp import DistributedDataParallel
from torchddp.harness.networks import ManySmallTensors

STEPS = 3


def work_of(module, x):
    """The device's events of a step, after warm-up."""

    def step():
        module.zero_grad(set_to_none=True)
        module(x).backward()

    for _ in range(STEPS):
        step()
    counts = trace.count(trace.record(lambda: [step() for _ in range(STEPS)]), STEPS)
    return counts.kernels + counts.copies + counts.fills


@pytest.mark.profiler
def test_a_thousand_gradients_take_a_few_launches(gpu, record_property):
    """torch's class launches one kernel per gradient."""
    torch.use_deterministic_algorithms(False)  # otherwise torch fills new memory, with one more kernel per tensor
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
    assert bare > 0, "the profiler recorded no kernel"
    assert ours <= theirs / 10, f"ours adds {ours:g} launches per step, torch's {theirs:g}"


@pytest.mark.profiler
def test_buckets_do_not_wait_for_the_end_of_backward(gpu):
    """On the device, our kernels start while gradients are still computed, and collectives have their own stream.

    With a divisor of two the weights, all large, are scaled by a kernel of NCCL's each.
    """
    width = 4096
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).to(gpu)
    ddp = halving(model, bucket_cap_mb=width * width * 2 / 2**20)
    x = torch.randn(width, width, device=gpu)

    def step():
        ddp.zero_grad(set_to_none=True)
        ddp(x).square().mean().backward()

    for _ in range(3):
        step()
    events = trace.record(step)
    computation = [event for event in events if is_computation(event)]
    ours = [event for event in events if "torchddp" in event.name or trace.is_collective(event)]
    assert computation, "the profiler recorded no kernel"
    assert ours, f"nothing of ours among {sorted({event.name for event in events})}"
    end_us = max(event.end_us for event in computation)
    early = sum(event.start_us < end_us for event in ours)
    assert early >= len(ours) // 2, f"{early} of {len(ours)} began before the last gradient was there"
    found = overlap(events)
    assert found.on_their_own_stream == found.collectives >= 6
