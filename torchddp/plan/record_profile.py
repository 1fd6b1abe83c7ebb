"""Records a wrapped model's step profile, from which `torchddp tune` and `torchddp simulate` start.

Note [What a step costs besides computing]

Steps with and without overlap alternate, so that both see the same machine. Without overlap, a step is the sum of its
parts: forward, backward, the messages one after another, and the rest, `overhead_s` (docs/simulate.md). The messages'
time is what remains of the step after the last gradient on the rank that gets there last, because it waits for no other
rank. They may take several times as long as messages timed alone, because the other ranks must wake up and their
threads share the cores with the computation; the cost of a message is scaled accordingly.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from torchddp import _C
from torchddp.ddp.module import DistributedDataParallel
from torchddp.plan.auto_plan import StepRecorder, plan_key
from torchddp.plan.buckets import buckets_of
from torchddp.plan.cost import measure_cost
from torchddp.plan.step_profile import Gradient, StepProfile
from torchddp.transport.message_cost import seconds_of

WARMUP_STEPS = 4
# Short steps are repeated for as long as this, but not more often than that.
LEAST_S, MOST_STEPS = 2.0, 400


def record_profile(
    model: DistributedDataParallel, step: Callable[[], object], *, name: str = "", steps: int = 9
) -> StepProfile:
    """Run and measure a model's step. Collective; all ranks get the same profile. The buckets stay as they are.

    After four warm-up steps, at least ``steps`` steps with overlap, which give ``step_s``, alternate with as many
    without, which give the parts of a step; short steps are repeated for up to two seconds. Then the cost of messages
    is measured. ``step`` runs one forward and backward of ``model`` (a ``torchddp.DistributedDataParallel``); what else
    it does counts as overhead. ``name``: the model's name in the profile; empty: its class's name.

    Raises:
        ValueError: ``steps`` below 1, a model that is still planning, or steps that synchronize nothing.
        TransportError: a peer is gone.
        NoRoomError: no shared memory for the messages that are timed.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    planning = model.observers.get("bucket_planning")
    if planning is not None and planning.is_under_way:
        raise ValueError("the model is still planning its buckets (bucket_cap_mb='auto' or replan()); record it later")
    session = model.session
    reducer, device = session.reducer, session.device
    transport, timeout = reducer.transport, session.wait_limit
    exchange = session.exchange(float)
    warm_s = [seconds_of(step, device) for _ in range(WARMUP_STEPS)]
    (wanted,) = exchange.of_rank_0([min(MOST_STEPS, LEAST_S / 2 / max(warm_s[-1], 1e-9))])
    overlapping_s, alone_s, exposed_s = [], [], []
    recorder = StepRecorder(reducer)
    try:
        for _ in range(max(steps, int(wanted))):
            recorder.pause()
            overlapping_s.append(seconds_of(step, device))
            recorder.resume()
            alone_s.append(seconds_of(step, device))
            recorder.collect()
            exposed_s.append(reducer.stats()["exposed_comm_time"] / 1e9)
    finally:
        recorder.pause()
    times = recorder.times(device, timeout)
    cost = measure_cost(transport, device, timeout, host_too=True)
    buckets = buckets_of(reducer.plan)
    medians = [statistics.median(overlapping_s), statistics.median(alone_s)]
    step_s, whole_s = (max(column) for column in zip(*exchange.gather(medians), strict=True))
    expected_s = sum(cost.seconds(sum(session.specs[i].numel * session.specs[i].itemsize for i in b)) for b in buckets)
    messages_s = expected_s
    if device.type == "cpu":  # a GPU still computes after the host's last gradient
        messages_s = max(expected_s, statistics.median(map(min, zip(*exchange.gather(exposed_s), strict=True))))
    slowdown = messages_s / expected_s if expected_s > 0 else 1.0
    return StepProfile(
        model=name or type(model.module).__name__,
        **asdict(plan_key(session)),
        overhead_s=max(0.0, whole_s - times.forward_s - times.backward_s - messages_s),
        message_slowdown=slowdown,
        device=device.type,
        gradients=tuple(
            Gradient(s.name, s.numel, s.itemsize, s.dtype, s.device, s.sparse, ready_s)
            for s, ready_s in zip(session.specs, times.ready_s, strict=True)
        ),
        order=times.order,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        cost=replace(cost, alpha_s=slowdown * cost.alpha_s, beta_s_per_byte=slowdown * cost.beta_s_per_byte),
        buckets=buckets,
        step_s=step_s,
        torchddp_version=_C.version,
        torch_version=torch.__version__,
    )
