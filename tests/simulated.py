"""Hand-made profiles for the tests of the simulator."""

from collections.abc import Sequence
from dataclasses import replace

from torchddp.plan.step_profile import Gradient, LinearCost, StepProfile

MB = 1_000_000


def make_profile(
    sizes_mb: Sequence[float] = (1, 2, 4),
    ready_ms: Sequence[float] = (30, 20, 10),
    *,
    buckets: tuple[tuple[int, ...], ...] | None = None,
    cost: LinearCost | None = None,
    device: str = "cuda",
    world_size: int = 2,
    step_s: float = 0.0,
) -> StepProfile:
    """Parameters in registration order: the last is ready first. Forward takes 10 ms, backward 30 ms."""
    count = len(sizes_mb)
    gradients = tuple(
        Gradient(f"layer{i}.weight", int(size * MB / 4), 4, 6, 0, False, ready / 1e3)
        for i, (size, ready) in enumerate(zip(sizes_mb, ready_ms, strict=True))
    )
    order = tuple(reversed(range(count)))
    return StepProfile(
        model="toy",
        fingerprint="f",
        world_size=world_size,
        ranks_per_host=1,
        transport="c10d",
        device=device,
        gradients=gradients,
        order=order,
        forward_s=0.010,
        backward_s=0.030,
        cost=cost or LinearCost(1e-3, 1e-9),
        buckets=buckets or tuple((i,) for i in order),
        step_s=step_s,
        torchddp_version="0.1.0",
        torch_version="2.13.0",
    )


def with_host(profile: StepProfile, s_per_byte: float, s_per_message: float = 0.0) -> StepProfile:
    """The profile with the transport's CPU time added."""
    return replace(profile, cost=replace(profile.cost, host_s_per_byte=s_per_byte, host_s_per_message=s_per_message))
