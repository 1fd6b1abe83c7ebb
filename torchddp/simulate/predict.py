"""Predicts a profile's step on other links and numbers of ranks, event by event, and finds the best plan there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torchddp.harness.variants import ArgumentError
from torchddp.plan.buckets import Buckets, planned_buckets
from torchddp.plan.step_profile import StepProfile
from torchddp.simulate import network
from torchddp.simulate.network import AllReduce, Link, runs_on_cpu

# A plan is called better only if it saves this share of the step: the model is not accurate enough for less.
MIN_GAIN = 0.005


@dataclass(frozen=True)
class Message:
    """A bucket's all-reduce, in seconds: when it could start if nothing else was sent, its duration, its CPU time."""

    ready_s: float
    duration_s: float
    host_s: float = 0.0


def run_backward(backward_s: float, messages: Iterable[Message], *, shared_cpu: bool) -> float:
    """When backward and all its messages have ended, in seconds since it began.

    With `shared_cpu`, messages take their CPU time from compute. The core is never idle until compute ends, so messages
    that used h seconds of it delay all later gradients by h.
    """
    free_s = lag_s = 0.0
    for message in messages:
        free_s = max(free_s, message.ready_s + lag_s) + message.duration_s
        if shared_cpu:
            # A message can't use a core for longer than it lasts.
            lag_s += min(message.host_s, message.duration_s)
    return max(backward_s + lag_s, free_s)


@dataclass(frozen=True)
class Prediction:
    step_s: float
    exposed_s: float  # what communication adds to compute
    compute_s: float  # the step without its messages
    comm_s: float  # all messages, hidden or not
    algorithm: str  # the one that carries the most bytes
    buckets: Buckets

    @property
    def efficiency(self) -> float:
        """The step without communication, divided by the step: 1 is perfect scaling."""
        return self.compute_s / self.step_s if self.step_s > 0 else 1.0


@dataclass(frozen=True)
class Scene:
    ranks_per_host: int = 1
    inner: Link = network.NVLINK
    algorithm: str = network.AUTO


def make_all_reduce(profile: StepProfile, link: Link, world_size: int, scene: Scene) -> AllReduce:
    """The cost of an all-reduce over `link`. ArgumentError for a link for which the profile lacks measurements.

    'auto' takes the cheapest algorithm of the recorded software: gloo has rings, NCCL rings and trees; with several
    ranks per host, hierarchical too. With the recorded latency, the only flat algorithm is the measured ring (Note
    [Software and wire]), so the recorded ranks over the recorded link get the recorded cost.
    """
    layout = network.Layout(world_size, scene.ranks_per_host)
    if scene.algorithm not in network.ALGORITHMS:
        raise ArgumentError(f"There is no algorithm '{scene.algorithm}'; choose from {', '.join(network.ALGORITHMS)}.")
    if world_size == 1:
        return AllReduce([network.NOTHING])
    outer = network.make_hop(profile, link)
    near = network.make_hop(profile, scene.inner) if layout.local > 1 else outer
    is_ring = runs_on_cpu(profile) or link.latency_s is None
    auto = (network.RING,) if is_ring else (network.RING, network.TREE)
    return AllReduce(network.all_reduce_lines(scene.algorithm, layout, outer, near, auto))


def predict_with(profile: StepProfile, all_reduce: AllReduce, buckets: Buckets) -> Prediction:
    messages = []
    carried: Counter[str] = Counter()
    for bucket in buckets:
        nbytes = sum(profile.gradients[index].nbytes for index in bucket)
        line = all_reduce.best(nbytes)
        carried[line.algorithm] += nbytes
        # A gradient alone in its bucket is not copied.
        pack_s = nbytes * profile.cost.pack_s_per_byte if len(bucket) > 1 else 0.0
        host_s = line.cost.host_s_per_message + nbytes * line.cost.host_s_per_byte + pack_s
        ready_s = max((profile.gradients[index].ready_s for index in bucket), default=0.0)
        messages.append(Message(ready_s, line.cost.seconds(nbytes) + pack_s, host_s))
    end_s = run_backward(profile.backward_s, messages, shared_cpu=runs_on_cpu(profile))
    return Prediction(
        step_s=profile.forward_s + profile.overhead_s + end_s,
        exposed_s=end_s - profile.backward_s,
        compute_s=profile.compute_s,
        comm_s=sum(message.duration_s for message in messages),
        algorithm=carried.most_common(1)[0][0],
        buckets=buckets,
    )


def predict(profile: StepProfile, link: Link, world_size: int, scene: Scene = Scene()) -> Prediction:
    """Predict the step in its own buckets. ArgumentError as `make_all_reduce`."""
    return predict_with(profile, make_all_reduce(profile, link, world_size, scene), profile.buckets)


@dataclass(frozen=True)
class Point:
    link: Link
    world_size: int
    recorded: Prediction
    best: Prediction
    # The best value of `bucket_cap_mb`, and the step with it.
    best_cap_mib: float
    capped: Prediction

    @property
    def gain(self) -> float:
        """The share of the recorded plan's step time that the best plan saves."""
        return 1 - self.best.step_s / self.recorded.step_s if self.recorded.step_s > 0 else 0.0

    @property
    def is_worth_changing(self) -> bool:
        return self.gain >= MIN_GAIN


def _planned(profile: StepProfile, all_reduce: AllReduce) -> list[Buckets]:
    # Buckets of different sizes may take different lines, but the planner takes a single line, so plan for each.
    smallest = min(gradient.nbytes for gradient in profile.gradients)
    lines = all_reduce.lines_between(smallest, profile.gradient_bytes)
    costs = [replace(line.cost, pack_s_per_byte=profile.cost.pack_s_per_byte) for line in lines]
    return [planned_buckets(profile.gradients, profile.order, profile.ready_s, cost) for cost in costs]


def _quickness(prediction: Prediction) -> tuple[float, int]:
    # In a tie, the plan with the fewest messages wins.
    return prediction.step_s, len(prediction.buckets)


def make_point(
    profile: StepProfile, link: Link, world_size: int, scene: Scene, by_cap: Mapping[float, Buckets]
) -> Point:
    all_reduce = make_all_reduce(profile, link, world_size, scene)
    recorded = predict_with(profile, all_reduce, profile.buckets)
    capped = {cap_mib: predict_with(profile, all_reduce, buckets) for cap_mib, buckets in by_cap.items()}
    planned = [predict_with(profile, all_reduce, plan) for plan in _planned(profile, all_reduce)]
    best_cap_mib = min(capped, key=lambda cap_mib: _quickness(capped[cap_mib]))
    best = min((recorded, *planned, *capped.values()), key=_quickness)
    return Point(link, world_size, recorded, best, best_cap_mib, capped[best_cap_mib])


def model_error(profile: StepProfile) -> float | None:
    """(predicted - measured) / measured for the recorded step itself; None if there is nothing to compare."""
    if profile.world_size == 1 or profile.step_s == 0:
        return None
    return predict(profile, network.MEASURED, profile.world_size).step_s / profile.step_s - 1
