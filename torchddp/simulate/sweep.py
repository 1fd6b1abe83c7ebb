"""Predictions over links and numbers of ranks, and the best plan at each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchddp.plan.buckets import Buckets
from torchddp.plan.step_profile import LinearCost, StepProfile
from torchddp.simulate.collectives import AUTO, AllReduce, Layout
from torchddp.simulate.links import MEASURED, NVLINK, Link
from torchddp.simulate.predict import Prediction, make_all_reduce, predict, predict_with

# The planner: the plan with the least exposed time for a cost that is linear in bytes.
BestBuckets = Callable[[StepProfile, LinearCost], Buckets]
# A plan has to save this share of the step before it is called better: less is beyond what a model can tell.
MIN_GAIN = 0.005


@dataclass(frozen=True)
class Scene:
    """What is asked: the ranks' place and how they reduce."""

    ranks_per_host: int = 1
    inner: Link = NVLINK
    algorithm: str = AUTO


@dataclass(frozen=True)
class Point:
    """One link and number of ranks: the recorded plan there, and the best one."""

    link: Link
    world_size: int
    recorded: Prediction
    best: Prediction
    # The best of the plans that `bucket_cap_mb` alone gives, and that cap in MiB.
    best_cap_mib: float
    capped: Prediction

    @property
    def gain(self) -> float:
        """Share of the recorded plan's step that the best plan saves."""
        return 1 - self.best.step_s / self.recorded.step_s if self.recorded.step_s > 0 else 0.0

    @property
    def is_worth_changing(self) -> bool:
        """Whether the best plan saves more than the model could be wrong by."""
        return self.gain >= MIN_GAIN


def _planned(profile: StepProfile, all_reduce: AllReduce, best_buckets: BestBuckets) -> list[Buckets]:
    # Buckets of different sizes may take different lines, and the planner knows one line at a time: ask it for each.
    smallest = min(gradient.nbytes for gradient in profile.gradients)
    lines = all_reduce.lines_between(smallest, profile.gradient_bytes)
    pack_s_per_byte = profile.cost.pack_s_per_byte
    return [best_buckets(profile, replace(line.cost, pack_s_per_byte=pack_s_per_byte)) for line in lines]


def _quickness(prediction: Prediction) -> tuple[float, int]:
    # Of equals the one with the fewest messages.
    return prediction.step_s, len(prediction.buckets)


def make_point(
    profile: StepProfile,
    link: Link,
    world_size: int,
    scene: Scene,
    by_cap: Mapping[float, Buckets],
    best_buckets: BestBuckets,
) -> Point:
    """Predict one point. ArgumentError as `make_all_reduce`."""
    layout = Layout(world_size, scene.ranks_per_host)
    all_reduce = make_all_reduce(profile, link, layout, scene.algorithm, scene.inner)
    recorded = predict_with(profile, all_reduce, profile.buckets)
    capped = {cap_mib: predict_with(profile, all_reduce, buckets) for cap_mib, buckets in by_cap.items()}
    planned = [predict_with(profile, all_reduce, plan) for plan in _planned(profile, all_reduce, best_buckets)]
    best_cap_mib = min(capped, key=lambda cap_mib: _quickness(capped[cap_mib]))
    best = min((recorded, *planned, *capped.values()), key=_quickness)
    return Point(link, world_size, recorded, best, best_cap_mib, capped[best_cap_mib])


def sweep(
    profile: StepProfile,
    links: Sequence[Link],
    world_sizes: Sequence[int],
    scene: Scene,
    by_cap: Mapping[float, Buckets],
    best_buckets: BestBuckets,
) -> list[Point]:
    """Every link with every number of ranks, links outermost."""
    return [make_point(profile, link, n, scene, by_cap, best_buckets) for link in links for n in world_sizes]


def model_error(profile: StepProfile) -> float | None:
    """(predicted - measured) / measured of the recorded step itself; None where there is nothing to compare."""
    if profile.world_size == 1 or profile.step_s == 0:
        return None
    return predict(profile, MEASURED, profile.world_size).step_s / profile.step_s - 1
