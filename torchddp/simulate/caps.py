"""The plans that `bucket_cap_mb` gives, for who sets nothing else."""

from __future__ import annotations

from torchddp.planner.step_profile import StepProfile
from torchddp.simulate.predict import Buckets

_MIB = 1024 * 1024
_CAPS_MIB = (1, 2, 5, 10, 25, 50, 100, 250, 1000)


def capped_buckets(profile: StepProfile, cap_mib: float) -> Buckets:
    """The buckets of `DistributedDataParallel(bucket_cap_mb=cap_mib)`, once rebuilt in the order of readiness."""
    # Here and not above: the rest of the simulation needs no extension.
    from torchddp import _C

    params = [_C.ParamSpec(g.name, g.numel, g.itemsize, g.dtype, g.device, g.sparse) for g in profile.gradients]
    plan = _C.make_bucket_plan(params, list(profile.order), [max(1, int(cap_mib * _MIB))])
    return tuple(tuple(bucket.params) for bucket in plan.buckets)


def plans_by_cap(profile: StepProfile) -> dict[int, Buckets]:
    """Plans by `bucket_cap_mb`, each plan once, under its smallest cap."""
    plans: dict[int, Buckets] = {}
    for cap_mib in _CAPS_MIB:
        plan = capped_buckets(profile, cap_mib)
        if plan not in plans.values():
            plans[cap_mib] = plan
    return plans
