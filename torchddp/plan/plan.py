"""The best bucket plan of a step profile, and plans as parameter indices. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchddp import _C
from torchddp.plan.merge import Buckets, merged_buckets
from torchddp.plan.step_profile import LinearCost, StepProfile

# Fewer messages are worth this share of the finish: each costs the host some time that the model does not know of.
SLACK_SHARE = 0.002


def param_specs(profile: StepProfile) -> list[_C.ParamSpec]:
    """The gradients as planning takes them."""
    return [
        _C.ParamSpec(g.name, g.numel, g.itemsize, dtype=g.dtype, device=g.device, sparse=g.sparse)
        for g in profile.gradients
    ]


def planned_buckets(
    specs: Sequence[_C.ParamSpec], order: Sequence[int], ready_s: Sequence[float], cost: LinearCost
) -> Buckets:
    """The buckets that finish first."""
    return merged_buckets(specs, order, ready_s, cost, SLACK_SHARE * max(ready_s))


def best_buckets(profile: StepProfile, cost: LinearCost) -> Buckets:
    """The buckets that finish first, by the profile's order and times."""
    return planned_buckets(param_specs(profile), profile.order, [g.ready_s for g in profile.gradients], cost)


def buckets_of(plan: _C.BucketPlan) -> Buckets:
    """Parameter indices of each bucket, in the order of launch."""
    return tuple(tuple(bucket.params) for bucket in plan.buckets)
