"""What an all-reduce costs by algorithm, in the alpha-beta model: lines over the number of bytes.

Ring and recursive doubling: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005). Double binary trees: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009), as a reduction followed by a broadcast. The additions are in the software's time per byte.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torchddp.harness.variants import ArgumentError
from torchddp.plan.step_profile import LinearCost
from torchddp.simulate.software import Hop, ring_steps, ring_volume

RING, DOUBLING, TREE, HIERARCHICAL, AUTO = "ring", "doubling", "tree", "hierarchical", "auto"
ALGORITHMS = (AUTO, RING, TREE, DOUBLING, HIERARCHICAL)
MAX_RANKS = 4096
# Into how many blocks each half of a message may be cut: powers of two come close enough to the best number.
TREE_BLOCKS = tuple(2**i for i in range(13))


@dataclass(frozen=True)
class Layout:
    """How ranks lie on hosts; a last host that is not full counts as a full one. ArgumentError out of range."""

    world_size: int
    ranks_per_host: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_RANKS:
            raise ArgumentError(f"The simulation is of 1 to {MAX_RANKS} ranks, not {self.world_size}.")
        if not 1 <= self.ranks_per_host <= MAX_RANKS:
            raise ArgumentError(f"A host has 1 to {MAX_RANKS} ranks, not {self.ranks_per_host}.")

    @property
    def local(self) -> int:
        """Ranks of a full host."""
        return min(self.world_size, self.ranks_per_host)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.world_size // self.ranks_per_host)


@dataclass(frozen=True)
class Line:
    """One algorithm's time, linear in the bytes; the host's part of `cost` is CPU time of each rank."""

    algorithm: str
    cost: LinearCost


# One rank alone.
NOTHING = Line("none", LinearCost(0.0, 0.0))


def _line(algorithm: str, alpha_s: float, beta: float, host_alpha_s: float, host_beta: float) -> Line:
    return Line(algorithm, LinearCost(alpha_s, beta, host_s_per_byte=host_beta, host_s_per_message=host_alpha_s))


def ring(layout: Layout, outer: Hop, inner: Hop) -> list[Line]:
    """Reduce-scatter, then all-gather, along a ring that enters and leaves each host once."""
    n = layout.world_size
    steps, volume = ring_steps(n), ring_volume(n)
    # On its way around, a chunk crosses from host to host as often as there are hosts.
    crossing = layout.hosts / n
    step_s = crossing * outer.step_s + (1 - crossing) * inner.step_s
    s_per_byte = outer.s_per_byte if layout.local == 1 else max(outer.s_per_byte, inner.s_per_byte)
    host = (steps * outer.host_step_s, volume * outer.host_s_per_byte)
    return [_line(RING, steps * step_s, volume * s_per_byte, *host)]


def _doubling_rounds(count: int) -> int:
    # Ranks beyond a power of two hand their share to another one first and get the result at the end.
    power = count.bit_length() - 1
    return power if count == 2**power else power + 2


def doubling(layout: Layout, outer: Hop, inner: Hop) -> list[Line]:
    """Whole messages exchanged with a partner at distance 1, 2, 4, ...: few steps, many bytes."""
    near, far = _doubling_rounds(layout.local), _doubling_rounds(layout.hosts)
    # All ranks of a host send at once through the host's one link.
    far_s_per_byte = max(layout.local * outer.wire_s_per_byte, outer.host_s_per_byte)
    rounds = near + far
    return [
        _line(
            DOUBLING,
            near * inner.step_s + far * outer.step_s,
            near * inner.s_per_byte + far * far_s_per_byte,
            rounds * outer.host_step_s,
            rounds * outer.host_s_per_byte,
        )
    ]


def tree(layout: Layout, outer: Hop, inner: Hop) -> list[Line]:
    """Two binary trees between the hosts, each with half of the message, in blocks; a chain of the ranks in each host.

    One line for each number of blocks: few blocks have little latency, many come close to the link's full rate.
    """
    s_per_byte = outer.s_per_byte if layout.local == 1 else max(outer.s_per_byte, inner.s_per_byte)
    depth, chain = 2 * math.ceil(math.log2(layout.hosts)), layout.local - 1
    lines = []
    for blocks in TREE_BLOCKS:
        rounds, share = depth + 2 * blocks, 1 / (2 * blocks)
        alpha_s = 2 * (rounds * outer.step_s + chain * inner.step_s)
        beta = 2 * share * (rounds * s_per_byte + chain * inner.s_per_byte)
        # A rank handles each block twice (up, down) and each byte too, however deep the tree is.
        lines.append(_line(TREE, alpha_s, beta, 4 * blocks * outer.host_step_s, 2 * outer.host_s_per_byte))
    return lines


_FLAT = {RING: ring, TREE: tree, DOUBLING: doubling}


def hierarchical(layout: Layout, outer: Hop, inner: Hop, algorithms: Sequence[str]) -> list[Line]:
    """Reduce-scatter in each host, all-reduce of every rank's shard between hosts, all-gather in each host.

    `algorithms`: the flat ones to choose from between hosts.
    """
    local = layout.local
    steps, volume = ring_steps(local), ring_volume(local)
    # The shards of a host's ranks share its link, and are the message as a whole; the work is divided among the ranks.
    shared = replace(outer, host_s_per_byte=outer.host_s_per_byte / local)
    between = [NOTHING.cost]
    if layout.hosts > 1:
        between = [line.cost for name in algorithms for line in _FLAT[name](Layout(layout.hosts), shared, shared)]
    return [
        _line(
            HIERARCHICAL,
            steps * inner.step_s + cost.alpha_s,
            volume * inner.s_per_byte + cost.beta_s_per_byte,
            steps * inner.host_step_s + cost.host_s_per_message,
            volume * inner.host_s_per_byte + cost.host_s_per_byte,
        )
        for cost in between
    ]


def all_reduce_lines(algorithm: str, layout: Layout, outer: Hop, inner: Hop, auto: Sequence[str]) -> list[Line]:
    """Every line that `algorithm` may take among two or more ranks.

    `auto`: the flat algorithms that 'auto', and 'hierarchical' between hosts, choose from.
    """
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
    """The least of some lines at every number of bytes."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._starts: list[float] = []  # bytes from which on the line at the same place is the least
        self.lines: list[Line] = []
        for line in sorted(lines, key=lambda line: (line.cost.alpha_s, line.cost.beta_s_per_byte)):
            self._add(line)

    def _add(self, line: Line) -> None:
        # Lines come with growing alpha: one is of use only where it is flatter than all before it.
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
        """The least line for a message of `nbytes`."""
        return self.lines[bisect_right(self._starts, nbytes) - 1]

    def lines_between(self, low_bytes: float, high_bytes: float) -> list[Line]:
        """The lines that are the least for some message of `low_bytes` to `high_bytes`."""
        first, last = (bisect_right(self._starts, nbytes) - 1 for nbytes in (low_bytes, high_bytes))
        return self.lines[first : last + 1]
