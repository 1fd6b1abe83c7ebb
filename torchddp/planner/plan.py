"""Bucket plans for step profiles: the best one, and what any of them costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchddp import _C
from torchddp.planner.step_profile import LinearCost, StepProfile

# Fewer messages are worth this share of the finish: each costs the host some time that the model does not know of.
SLACK_SHARE = 0.002

Buckets = tuple[tuple[int, ...], ...]


def param_specs(profile: StepProfile) -> list[_C.ParamSpec]:
    """The gradients as the C++ planner takes them."""
    return [
        _C.ParamSpec(g.name, g.numel, g.itemsize, dtype=g.dtype, device=g.device, sparse=g.sparse)
        for g in profile.gradients
    ]


def best_plan(profile: StepProfile, cost: LinearCost) -> _C.BucketPlan:
    """The plan that finishes first, by the profile's order and times."""
    return merged_plan(param_specs(profile), profile.order, [g.ready_s for g in profile.gradients], cost)


def merged_plan(
    specs: Sequence[_C.ParamSpec], order: Sequence[int], ready_s: Sequence[float], cost: LinearCost
) -> _C.BucketPlan:
    """The plan that finishes first: :func:`torchddp._C.make_merged_plan`."""
    costs = (cost.alpha_s, cost.beta_s_per_byte, cost.pack_s_per_byte)
    return _C.make_merged_plan(specs, order, ready_s, *costs, slack_s=SLACK_SHARE * max(ready_s))


def finish_s(plan: _C.BucketPlan, specs: Sequence[_C.ParamSpec], ready_s: Sequence[float], cost: LinearCost) -> float:
    """Predicted seconds from the begin of backward until the last bucket is reduced."""
    return _C.predict_finish_s(plan, specs, ready_s, cost.alpha_s, cost.beta_s_per_byte, cost.pack_s_per_byte)


def best_buckets(profile: StepProfile, cost: LinearCost) -> Buckets:
    """The plan that finishes first, as parameter indices of each bucket in the order of launch."""
    return buckets_of(best_plan(profile, cost))


def buckets_of(plan: _C.BucketPlan) -> Buckets:
    """Parameter indices of each bucket, in the order of launch."""
    return tuple(tuple(bucket.params) for bucket in plan.buckets)


def plan_of(buckets: Sequence[Sequence[int]], specs: Sequence[_C.ParamSpec]) -> _C.BucketPlan:
    """The plan with these buckets; ValueError if they are none for these parameters."""
    words = [1, len(buckets), *(word for bucket in buckets for word in (len(bucket), *bucket))]
    size = 2 + 2 * len(specs)
    if len(words) > size:
        raise ValueError(f"the buckets name {len(words) - 2 - len(buckets)} parameters, the model has {len(specs)}")
    return _C.decode_plan(words + [0] * (size - len(words)), specs)
