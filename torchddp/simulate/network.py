"""Predicts the cost of an all-reduce elsewhere from the link, the software at its two ends, and the algorithm.

Note [Software and wire]

docs/simulate.md has the model and its limits. A profile has two measurements of an all-reduce: its time over the
recorded transport (`alpha + bytes * beta`), and a rank's CPU time over TCP, which does not depend on the link. The
recorded all-reduce is assumed to be a ring, as in gloo and, for large messages, in NCCL: n ranks take 2 (n - 1) steps
and move 2 (n - 1) / n bytes for each byte. Dividing the measurements by these gives the cost of one step and of one
byte moved, and from those the cost of other algorithms and of other numbers of ranks.

For a GPU model, the CPU only launches the steps and then waits: its time says nothing about the transport and is not
used.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add

from torchddp.harness.variants import ArgumentError
from torchddp.plan.step_profile import LinearCost, StepProfile


@dataclass(frozen=True)
class Link:
    """A host's connection to the other hosts, shared by its ranks; inside a host, a rank's connection to the others.

    `bytes_per_s`: a program's bytes, per direction. `latency_s`: one way, without the CPU time of the two ends, which
    the profile has. None: as recorded in the profile.
    """

    name: str
    title: str
    bytes_per_s: float | None
    latency_s: float | None


# A full Ethernet frame (1538 bytes with preamble and gap) carries 1448 of a program's: TCP with timestamps, MTU 1500.
_TCP_SHARE = 1448 / 1538

MEASURED = Link("measured", "the recorded link", None, None)
PRESETS = {
    link.name: link
    for link in (
        # 18 links of 25 GB/s each, of which NCCL assumes 20.6 (SM90_NVLINK_BW in its topo.h); 1.9 us is a step of its
        # ring over NVLink with the LL128 protocol (hwLat in its tuning.cc).
        Link("nvlink", "NVLink of an H100", 18 * 20.6e9, 1.9e-6),
        # The simulator SimAI assumes 48.5 of 50 GB/s for a ConnectX-7 (calbusbw.h); 4.0 us is hwLat over a network.
        Link("ib400", "InfiniBand 400 Gbit/s, one port per host", 48.5e9, 4.0e-6),
        # Ethernet latencies vary more between sites than between rates. For 1 Gbit/s, AppNeta (2009) gives 120 to
        # 180 us for a round trip between programs, a third of it for sending the frames; half of the rest is one way.
        # 25 us and 10 us are guesses between that and InfiniBand; `--link` takes a measured latency.
        Link("eth100", "Ethernet 100 Gbit/s, TCP", 12.5e9 * _TCP_SHARE, 10e-6),
        Link("eth10", "Ethernet 10 Gbit/s, TCP", 1.25e9 * _TCP_SHARE, 25e-6),
        Link("eth1", "Ethernet 1 Gbit/s, TCP", 0.125e9 * _TCP_SHARE, 50e-6),
    )
}
NVLINK = PRESETS["nvlink"]

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])bit", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_link(text: str) -> Link:
    """Parse a preset's name, `measured`, or a rate with an optional latency: `25gbit,15us`. ArgumentError otherwise.

    The rate is the line rate, from which TCP's headers are deducted, as for the Ethernet presets.
    """
    name = text.strip().lower()
    if name == MEASURED.name:
        return MEASURED
    if name in PRESETS:
        return PRESETS[name]
    rate_text, comma, latency_text = name.partition(",")
    rate, latency = _RATE.fullmatch(rate_text.strip()), _LATENCY.fullmatch(latency_text.strip())
    if rate is None or (comma and latency is None):
        raise ArgumentError(
            f"There is no link '{text}'; choose from {', '.join((*PRESETS, MEASURED.name))}, or give a rate and, "
            "optionally, a latency, like 25gbit or 25gbit,15us."
        )
    bytes_per_s = float(rate[1]) * _BITS[rate[2]] / 8 * _TCP_SHARE
    if bytes_per_s <= 0:
        raise ArgumentError(f"The link '{text}' carries nothing: its rate must be above 0.")
    if latency is None:
        return Link(name, "as given, with the recorded latency", bytes_per_s, None)
    return Link(name, "as given", bytes_per_s, float(latency[1]) * _SECONDS[latency[2]])


# --- from a profile to one step over a link ---


@dataclass(frozen=True)
class Hop:
    """One step between two ranks over one link. In seconds, and seconds per byte moved."""

    step_s: float  # includes the CPU time of the two ends
    wire_s_per_byte: float
    # CPU time.
    host_step_s: float
    host_s_per_byte: float

    @property
    def s_per_byte(self) -> float:
        """The slower of link and CPU, which work at the same time."""
        return max(self.wire_s_per_byte, self.host_s_per_byte)


# CPU time was measured for an all-reduce between two ranks.
MEASURED_RANKS = 2


def ring_steps(world_size: int) -> int:
    return 2 * (world_size - 1)


def ring_volume(world_size: int) -> float:
    """Bytes that each rank sends in a ring all-reduce, per byte reduced."""
    return 2 * (world_size - 1) / world_size


def runs_on_cpu(profile: StepProfile) -> bool:
    """Whether compute and communication share the cores."""
    return profile.device.startswith("cpu")


def software_of(profile: StepProfile, *, as_recorded: bool) -> tuple[float, float]:
    """CPU seconds of an all-reduce over TCP, per step and per byte moved; 0 with a GPU, or for a profile of one rank.

    `as_recorded`: at most the time of the recorded all-reduces, which may not have used TCP, or used several threads.
    """
    if profile.world_size == 1 or not runs_on_cpu(profile):
        return 0.0, 0.0
    cost = profile.cost
    step_s = cost.host_s_per_message / ring_steps(MEASURED_RANKS)
    s_per_byte = cost.host_s_per_byte / ring_volume(MEASURED_RANKS)
    if as_recorded:
        step_s = min(step_s, cost.alpha_s / ring_steps(profile.world_size))
        s_per_byte = min(s_per_byte, cost.beta_s_per_byte / ring_volume(profile.world_size))
    return step_s, s_per_byte


def make_hop(profile: StepProfile, link: Link) -> Hop:
    host_step_s, host_s_per_byte = software_of(profile, as_recorded=link.bytes_per_s is None)
    if profile.world_size == 1 and (link.bytes_per_s is None or link.latency_s is None):
        raise ArgumentError(
            f"The profile of 1 rank has no link to scale. For '{link.name}', give rate and latency, such as 10gbit,20us"
        )
    if link.latency_s is None:
        step_s = max(profile.cost.alpha_s / ring_steps(profile.world_size), host_step_s)
    else:
        step_s = link.latency_s + host_step_s
    if link.bytes_per_s is None:
        wire_s_per_byte = profile.cost.beta_s_per_byte / ring_volume(profile.world_size)
    else:
        wire_s_per_byte = 1 / link.bytes_per_s
    return Hop(step_s, wire_s_per_byte, host_step_s, host_s_per_byte)


# --- algorithms, in the alpha-beta model: lines over the number of bytes ---

# Ring: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005). Double
# binary trees: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
# (2009), as a reduction followed by a broadcast. Additions are in the software's time per byte.
RING, TREE, HIERARCHICAL, AUTO = "ring", "tree", "hierarchical", "auto"
ALGORITHMS = (AUTO, RING, TREE, HIERARCHICAL)
MAX_RANKS = 4096
# Numbers of blocks to cut each half of a message into: the best power of two is close enough to the best number.
TREE_BLOCKS = tuple(2**i for i in range(13))


@dataclass(frozen=True)
class Layout:
    """How ranks are placed on hosts; a partly filled last host counts as full. ArgumentError if out of range."""

    world_size: int
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        for what, count in (("ranks", self.world_size), ("ranks per host", self.ranks_per_host)):
            if not 1 <= count <= MAX_RANKS:
                raise ArgumentError(f"The number of {what} must be 1 to {MAX_RANKS}, not {count}.")

    @property
    def local(self) -> int:
        return min(self.world_size, self.ranks_per_host)

    @property
    def hosts(self) -> int:
        return -(-self.world_size // self.ranks_per_host)


@dataclass(frozen=True)
class Line:
    """One algorithm's time, linear in the bytes; the host part of `cost` is each rank's CPU time."""

    algorithm: str
    cost: LinearCost


# For a single rank.
NOTHING = Line("none", LinearCost(0.0, 0.0))


def ring(layout: Layout, outer: Hop, inner: Hop) -> list[Line]:
    """Reduce-scatter, then all-gather, along a ring that enters and leaves each host once."""
    n = layout.world_size
    steps, volume = ring_steps(n), ring_volume(n)
    # On its way around the ring, a chunk crosses from host to host as many times as there are hosts.
    crossing = layout.hosts / n
    step_s = crossing * outer.step_s + (1 - crossing) * inner.step_s
    s_per_byte = outer.s_per_byte if layout.local == 1 else max(outer.s_per_byte, inner.s_per_byte)
    host = (volume * outer.host_s_per_byte, steps * outer.host_step_s)
    return [Line(RING, LinearCost(steps * step_s, volume * s_per_byte, *host))]


def tree(layout: Layout, outer: Hop, inner: Hop) -> list[Line]:
    """Two binary trees between hosts, each carrying half of the message in blocks, and a chain of ranks in each host.

    One line for each number of blocks: with few, latency is low; with many, the link runs close to its full rate.
    """
    s_per_byte = outer.s_per_byte if layout.local == 1 else max(outer.s_per_byte, inner.s_per_byte)
    depth, chain = 2 * math.ceil(math.log2(layout.hosts)), layout.local - 1
    lines = []
    for blocks in TREE_BLOCKS:
        rounds, share = depth + 2 * blocks, 1 / (2 * blocks)
        alpha_s = 2 * (rounds * outer.step_s + chain * inner.step_s)
        beta = 2 * share * (rounds * s_per_byte + chain * inner.s_per_byte)
        # A rank handles each block and each byte twice (up and down), however deep the tree is.
        lines.append(Line(TREE, LinearCost(alpha_s, beta, 2 * outer.host_s_per_byte, 4 * blocks * outer.host_step_s)))
    return lines


_FLAT = {RING: ring, TREE: tree}


def hierarchical(layout: Layout, outer: Hop, inner: Hop, algorithms: Sequence[str]) -> list[Line]:
    """Reduce-scatter in each host, all-reduce of shards between hosts by the best of `algorithms`, all-gather."""
    local = layout.local
    steps, volume = ring_steps(local), ring_volume(local)
    # The shards of a host's ranks share its link and add up to the whole message; the CPU's work is divided among them.
    shared = replace(outer, host_s_per_byte=outer.host_s_per_byte / local)
    between = [NOTHING.cost]
    if layout.hosts > 1:
        between = [line.cost for name in algorithms for line in _FLAT[name](Layout(layout.hosts), shared, shared)]
    inside = LinearCost(
        steps * inner.step_s, volume * inner.s_per_byte, volume * inner.host_s_per_byte, steps * inner.host_step_s
    )
    # One after the other, so everything adds up.
    return [Line(HIERARCHICAL, LinearCost(*map(add, astuple(inside), astuple(cost)))) for cost in between]


def all_reduce_lines(algorithm: str, layout: Layout, outer: Hop, inner: Hop, auto: Sequence[str]) -> list[Line]:
    """Every line of `algorithm`. `auto`: the flat ones that 'auto', and 'hierarchical' between hosts, choose from."""
    if algorithm == HIERARCHICAL:
        return hierarchical(layout, outer, inner, auto)
    flat = auto if algorithm == AUTO else (algorithm,)
    if layout.hosts == 1:
        return [line for name in flat for line in _FLAT[name](Layout(layout.world_size), inner, inner)]
    lines = [line for name in flat for line in _FLAT[name](layout, outer, inner)]
    if algorithm == AUTO and layout.local > 1:
        lines += hierarchical(layout, outer, inner, auto)
    return lines


class AllReduce:
    """The cheapest of several lines at every message size: their lower envelope."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._starts: list[float] = []  # the bytes from which on the line at the same index is the cheapest
        self.lines: list[Line] = []
        for line in sorted(lines, key=lambda line: (line.cost.alpha_s, line.cost.beta_s_per_byte)):
            self._add(line)

    def _add(self, line: Line) -> None:
        # Lines come in order of alpha, so a line can only be the cheapest if it is flatter than all before it.
        while self.lines:
            last = self.lines[-1].cost
            if line.cost.beta_s_per_byte >= last.beta_s_per_byte:
                return
            start = (line.cost.alpha_s - last.alpha_s) / (last.beta_s_per_byte - line.cost.beta_s_per_byte)
            if start > self._starts[-1]:
                break
            self.lines.pop()
            self._starts.pop()
        self._starts.append(start if self.lines else 0.0)
        self.lines.append(line)

    def best(self, nbytes: float) -> Line:
        return self.lines[bisect_right(self._starts, nbytes) - 1]

    def lines_between(self, low_bytes: float, high_bytes: float) -> list[Line]:
        first, last = (bisect_right(self._starts, nbytes) - 1 for nbytes in (low_bytes, high_bytes))
        return self.lines[first : last + 1]
