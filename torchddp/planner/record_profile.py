"""A step profile of a wrapped model: what `torchddp tune`, `torchddp simulate` and curious people start from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.distributed import DistributedDataParallel
from torchddp.planner.calibrate import measure_cost
from torchddp.planner.plan import buckets_of
from torchddp.planner.plan_cache import fingerprint
from torchddp.planner.recorder import StepRecorder
from torchddp.planner.step_profile import Gradient, StepProfile

WARMUP_STEPS = 4


def record_profile(
    model: DistributedDataParallel, step: Callable[[], Any], *, name: str = "", steps: int = 9
) -> StepProfile:
    """Collective: run ``step`` (one forward and backward of ``model``) and measure. The same profile on all ranks.

    Warm-up (four steps), ``steps`` with overlap for ``step_s``, and ``steps`` without it, in which ready times and the
    time of computation alone are taken; then the cost of messages is measured on the model's group. ``step`` may
    zero gradients and step an optimizer, which then count as part of forward. Holds nothing afterwards; the buckets
    stay as they are.

    Raises:
        ValueError: ``steps`` below 1. TransportError: a peer is gone.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    reducer, device = model.reducer, next(iter(model._module_parameters)).device
    for _ in range(WARMUP_STEPS):
        step()
    step_s = statistics.median(timed_step(step, device) for _ in range(steps))
    recorder = StepRecorder(reducer)
    try:
        for _ in range(steps):
            step()
            recorder.collect()
    finally:
        recorder.stop()
    times = recorder.times(device)
    transport = reducer.transport
    gathered: list[Any] = [None] * transport.size
    dist.all_gather_object(gathered, (step_s, _C.host_identity()), group=model.process_group)
    hosts = [host for _, host in gathered]
    return StepProfile(
        model=name or type(model.module).__name__,
        fingerprint=fingerprint(model._specs, device.type),
        world_size=transport.size,
        ranks_per_host=max(hosts.count(host) for host in hosts),
        transport=transport.name,
        device=device.type,
        gradients=tuple(
            Gradient(s.name, s.numel, s.itemsize, s.dtype, s.device, s.sparse, ready_s)
            for s, ready_s in zip(model._specs, times.ready_s, strict=True)
        ),
        order=times.order,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        cost=measure_cost(transport, device, host_too=True),
        buckets=buckets_of(reducer.plan),
        step_s=max(seconds for seconds, _ in gathered),
        torchddp_version=_C.version,
        torch_version=torch.__version__,
    )


def timed_step(step: Callable[[], Any], device: torch.device) -> float:
    """Seconds that one step takes; on a device, until it has done all of it."""
    before_s = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - before_s
