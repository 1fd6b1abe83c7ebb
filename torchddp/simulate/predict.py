"""The step of a profile, on a link, with a number of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torchddp.harness.variants import ArgumentError
from torchddp.plan.buckets import Buckets
from torchddp.plan.step_profile import StepProfile
from torchddp.simulate.collectives import ALGORITHMS, AUTO, NOTHING, RING, TREE, AllReduce, Layout, all_reduce_lines
from torchddp.simulate.links import NVLINK, Link
from torchddp.simulate.software import make_hop, runs_on_cpu
from torchddp.simulate.step import Message, run_backward


@dataclass(frozen=True)
class Prediction:
    """A step as predicted. Seconds."""

    step_s: float
    exposed_s: float  # what communication adds to compute
    compute_s: float  # forward and backward alone
    comm_s: float  # all messages, hidden or not
    algorithm: str  # that carries the most bytes
    buckets: Buckets

    @property
    def efficiency(self) -> float:
        """Compute alone through the step: 1 is perfect scaling."""
        return self.compute_s / self.step_s if self.step_s > 0 else 1.0


def make_all_reduce(
    profile: StepProfile, link: Link, layout: Layout, algorithm: str = AUTO, inner: Link = NVLINK
) -> AllReduce:
    """What an all-reduce would take there. ArgumentError for a link that the profile knows nothing of.

    'auto' takes the least of what the recorded software has: gloo has rings, NCCL rings and trees; with several ranks a
    host, hierarchical too. A link with the recorded latency stays with the ring that was measured (Note [Software and
    wire]), so that the recorded number of ranks over the recorded link gets the recorded cost back.
    """
    if algorithm not in ALGORITHMS:
        raise ArgumentError(f"There is no algorithm '{algorithm}'; choose from {', '.join(ALGORITHMS)}.")
    if layout.world_size == 1:
        return AllReduce([NOTHING])
    outer = make_hop(profile, link)
    near = make_hop(profile, inner) if layout.local > 1 else outer
    auto = (RING,) if runs_on_cpu(profile) or link.latency_s is None else (RING, TREE)
    return AllReduce(all_reduce_lines(algorithm, layout, outer, near, auto))


def predict_with(profile: StepProfile, all_reduce: AllReduce, buckets: Buckets) -> Prediction:
    """The step with these buckets, launched in this order."""
    messages = []
    carried: Counter[str] = Counter()
    for bucket in buckets:
        nbytes = sum(profile.gradients[index].nbytes for index in bucket)
        line = all_reduce.best(nbytes)
        carried[line.algorithm] += nbytes
        # A gradient alone in its bucket need not be copied into it.
        pack_s = nbytes * profile.cost.pack_s_per_byte if len(bucket) > 1 else 0.0
        host_s = line.cost.host_s_per_message + nbytes * line.cost.host_s_per_byte + pack_s
        ready_s = max((profile.gradients[index].ready_s for index in bucket), default=0.0)
        messages.append(Message(ready_s, line.cost.seconds(nbytes) + pack_s, host_s))
    timeline = run_backward(profile.backward_s, messages, shared_cpu=runs_on_cpu(profile))
    return Prediction(
        step_s=profile.forward_s + timeline.end_s,
        exposed_s=timeline.end_s - profile.backward_s,
        compute_s=profile.forward_s + profile.backward_s,
        comm_s=sum(message.duration_s for message in messages),
        algorithm=carried.most_common(1)[0][0],
        buckets=buckets,
    )


def predict(
    profile: StepProfile,
    link: Link,
    world_size: int,
    ranks_per_host: int = 1,
    algorithm: str = AUTO,
    buckets: Buckets | None = None,
    inner: Link = NVLINK,
) -> Prediction:
    """The profile's step on `link` with `world_size` ranks, in its own buckets or in `buckets`.

    `inner` connects the ranks of a host. ArgumentError as `make_all_reduce`.
    """
    all_reduce = make_all_reduce(profile, link, Layout(world_size, ranks_per_host), algorithm, inner)
    return predict_with(profile, all_reduce, profile.buckets if buckets is None else buckets)
