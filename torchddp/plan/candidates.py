"""What is tried: plans by bucket size, the one in use, and the planned one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchddp import _C
from torchddp.plan.merge import Buckets
from torchddp.plan.plan import best_buckets, buckets_of, param_specs
from torchddp.plan.step_profile import StepProfile

DEFAULT_CAPS_MB: tuple[float, ...] = (0.25, 0.5, 1, 2, 5, 10, 25, 50, 100)
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Candidate:
    """One row of the table: buckets, and the argument that makes them."""

    name: str
    argument: str  # of DistributedDataParallel; empty for its default
    buckets: Buckets
    cap_mb: float | None = None  # where the argument is a size: the place on the curve


def make_candidates(profile: StepProfile, caps_mb: Sequence[float]) -> tuple[Candidate, ...]:
    """The default of the profile, the planned one, and one per cap in the profile's order.

    Of caps that make the same buckets the smallest; one as large as all gradients stands for every larger one.
    """
    specs = param_specs(profile)
    found = [
        Candidate("default", "", profile.buckets),
        Candidate("planned", 'bucket_cap_mb="auto"', best_buckets(profile, profile.cost)),
    ]
    for cap_mb in sorted(set(caps_mb)):
        buckets = buckets_of(_C.make_bucket_plan(specs, profile.order, [max(1, int(cap_mb * _MIB))]))
        if all(other.buckets != buckets for other in found if other.cap_mb is not None):
            found.append(Candidate(f"{cap_mb:g} MiB", f"bucket_cap_mb={cap_mb:g}", buckets, cap_mb))
        if len(buckets) == len({(g.dtype, g.device, g.sparse) for g in profile.gradients}):
            break  # one of each kind: a larger cap changes nothing
    return tuple(found)
