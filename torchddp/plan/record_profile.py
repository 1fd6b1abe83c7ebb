"""A step profile of a wrapped model: what `torchddp tune`, `torchddp simulate` and curious people start from."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from torchddp import _C
from torchddp.plan.auto_plan import StepRecorder, plan_key
from torchddp.plan.buckets import buckets_of
from torchddp.plan.cost import measure_cost
from torchddp.plan.step_profile import Gradient, StepProfile
from torchddp.transport.agreement import TransportExchange
from torchddp.transport.message_cost import seconds_of

WARMUP_STEPS = 4


def record_profile(model: Any, step: Callable[[], Any], *, name: str = "", steps: int = 9) -> StepProfile:
    """Collective: run ``step`` (one forward and backward of ``model``, a ``torchddp.DistributedDataParallel``) and
    measure. The same profile on all ranks.

    Warm-up (four steps), ``steps`` with overlap for ``step_s``, and ``steps`` without it, in which ready times and the
    time of computation alone are taken; then the cost of messages is measured on the model's group. ``step`` may
    zero gradients and step an optimizer, which then count as part of forward. Holds nothing afterwards; the buckets
    stay as they are.

    Raises:
        ValueError: ``steps`` below 1, a model that is still planning, or steps that synchronise nothing.
        TransportError: a peer is gone. NoRoomError: no shared memory for the messages that are timed.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    planning = model.observers.get("bucket_planning")
    if planning is not None and planning.is_under_way:
        raise ValueError("the model is still planning its buckets (bucket_cap_mb='auto' or replan()); record it later")
    session = model.session
    reducer, device = session.reducer, session.device
    for _ in range(WARMUP_STEPS):
        step()
    step_s = statistics.median(seconds_of(step, device) for _ in range(steps))
    recorder = StepRecorder(reducer)
    try:
        for _ in range(steps):
            step()
            recorder.collect()
    finally:
        recorder.stop()
    transport, timeout = reducer.transport, session.wait_limit
    times = recorder.times(device, timeout)
    key = plan_key(session)
    return StepProfile(
        model=name or type(model.module).__name__,
        fingerprint=key.fingerprint,
        world_size=transport.size,
        ranks_per_host=key.ranks_per_host,
        transport=transport.name,
        backend=key.backend,
        device=device.type,
        gradients=tuple(
            Gradient(s.name, s.numel, s.itemsize, s.dtype, s.device, s.sparse, ready_s)
            for s, ready_s in zip(session.specs, times.ready_s, strict=True)
        ),
        order=times.order,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        cost=measure_cost(transport, device, timeout, host_too=True),
        buckets=buckets_of(reducer.plan),
        step_s=max(seconds for (seconds,) in TransportExchange(transport, float, device, timeout).gather([step_s])),
        torchddp_version=_C.version,
        torch_version=torch.__version__,
    )
