"""What of a measured all-reduce is the machine's own work, and what the same software would need over another link.

Note [Software and wire]

A profile has two measurements of all-reduces: the time they took over the recorded transport (`alpha + bytes * beta`),
and the CPU time that one takes a rank over TCP, measured within one process and so the same over any link. The second
is what remains when the link gets faster. Bytes move through both at once, so the slower of the two sets the pace: s
per byte = max(wire, CPU). A step of a message needs both in turn: latency + CPU time.

The recorded all-reduce is taken to be a ring's, which is gloo's and, for large messages, NCCL's: n ranks take 2 (n - 1)
steps and move 2 (n - 1) / n bytes for each byte. Divided by that, the measurements are of one step and of one byte
moved, from which any other algorithm and any other number of ranks can be built.

On the CPU, steps are taken by the CPU, and its time per message grows with their number. With a GPU the CPU only
launches, and its time is what it spent waiting: it says nothing of the transport and is not used.

Limits: what a GPU takes to launch, and its kernels per byte, is not known; over a link faster than the recorded one it
counts as nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchddp.harness.variants import ArgumentError
from torchddp.plan.step_profile import StepProfile
from torchddp.simulate.links import Link


@dataclass(frozen=True)
class Hop:
    """One step between two ranks over one link, with the work of its two ends. Seconds, and seconds per byte moved."""

    step_s: float
    wire_s_per_byte: float
    # CPU time, contained in the two above.
    host_step_s: float
    host_s_per_byte: float

    @property
    def s_per_byte(self) -> float:
        """Pace of the bytes: the slower of link and CPU."""
        return max(self.wire_s_per_byte, self.host_s_per_byte)


@dataclass(frozen=True)
class Software:
    """CPU time of the transport, per step and per byte moved."""

    step_s: float
    s_per_byte: float


NO_SOFTWARE = Software(0.0, 0.0)
# The all-reduce whose CPU time was measured was one between two ranks.
MEASURED_RANKS = 2


def ring_steps(world_size: int) -> int:
    """Steps of a ring all-reduce, one after the other."""
    return 2 * (world_size - 1)


def ring_volume(world_size: int) -> float:
    """Bytes that each rank sends in a ring all-reduce, per byte reduced."""
    return 2 * (world_size - 1) / world_size


def runs_on_cpu(profile: StepProfile) -> bool:
    """Whether compute and communication want the same cores."""
    return profile.device.startswith("cpu")


def software_of(profile: StepProfile, *, as_recorded: bool) -> Software:
    """The CPU's part of an all-reduce over TCP; nothing with a GPU, or if only one rank was there.

    `as_recorded`: at most what the recorded all-reduces took, which may not have gone over TCP, or in several threads.
    """
    if profile.world_size == 1 or not runs_on_cpu(profile):
        return NO_SOFTWARE
    cost = profile.cost
    step_s, s_per_byte = (
        cost.host_s_per_message / ring_steps(MEASURED_RANKS),
        cost.host_s_per_byte / ring_volume(MEASURED_RANKS),
    )
    if as_recorded:
        step_s = min(step_s, cost.alpha_s / ring_steps(profile.world_size))
        s_per_byte = min(s_per_byte, cost.beta_s_per_byte / ring_volume(profile.world_size))
    return Software(step_s, s_per_byte)


def make_hop(profile: StepProfile, link: Link) -> Hop:
    """A step of the profile's software over `link`. ArgumentError if that takes a measurement that does not exist."""
    software = software_of(profile, as_recorded=link.bytes_per_s is None)
    if profile.world_size == 1 and (link.bytes_per_s is None or link.latency_s is None):
        raise ArgumentError(
            f"The profile was recorded with 1 rank and knows no link, so the link '{link.name}' means nothing: name "
            "one with rate and latency, like 10gbit,20us."
        )
    if link.latency_s is None:
        step_s = max(profile.cost.alpha_s / ring_steps(profile.world_size), software.step_s)
    else:
        step_s = link.latency_s + software.step_s
    if link.bytes_per_s is None:
        wire_s_per_byte = profile.cost.beta_s_per_byte / ring_volume(profile.world_size)
    else:
        wire_s_per_byte = 1 / link.bytes_per_s
    return Hop(step_s, wire_s_per_byte, software.step_s, software.s_per_byte)
