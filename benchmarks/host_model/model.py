"""What an all-reduce of fp32 moves between the processors of one host, as closed formulas. Pure.

A line moves when a rank reads a cache line that another rank has written since it last looked. W ranks run on nodes of
memory, consecutive ranks on the same one. P is how many pairs of different ranks there are, in both orders: W (W - 1);
across the link go the lines of pairs on two nodes. Everybody is taken to find what it looks for at the first look: who
polls while a line is being written moves it once more.

flat, which torchddp did for any number of ranks before: every rank reads what every other one has written.
    up to 8 KB  its count of operations, its post, ceil(bytes / 64) lines of input, and how far it has come with its own
                reading: P (3 + ceil(bytes / 64)) lines.
    above       Rank r sums part r of W of all blocks and writes it to all. Of blocks, W - 1 times the bytes are read,
                and as much again when those they belong to look at the sums. Counts, posts, "my part is done" and
                "I have come so far" are 4 P lines.

grouped, which it does now:
    up to 4 ranks and 8 KB
                As above; but a post says itself that it is there, and its first line has room for 32 bytes of the
                input: P L lines, where L = ceil((32 + bytes) / 64).
    up to 1 KB  G groups of up to 8 ranks of a node. A leader reads its group's posts and the sum of the groups before,
                (W - G) L and (G - 1) L lines. The last one has the total; the other leaders read it there, and their
                groups from them: (G - 1) L and (W - G) L lines. In all 2 (W - 1) L.
    above       On each of N nodes one rank owns a chunk: it reads its node's blocks and the sum of the nodes before,
                (W - N) and (N - 1) times the bytes, and the total goes the same way back. In all 2 (W - 1) times the
                bytes, as in flat, but only 2 (N - 1) times across the link. Posts and "my chunks are done" are 2 P
                lines; and each owner but those of the first node looks whether the sum before is there.
    And always  once in 64 operations every rank looks how far every other one has come: P / 64 lines.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMES = ("flat", "grouped")
LINE_BYTES = 64
# csrc/shm: Parcel, kSlots, kEagerBytes and kChainBytes of layout.h; kFlatRanks of operation.cpp; kSmall of groups.cpp.
HEAD_BYTES, SLOTS = 32, 64
EAGER_BYTES, CHAIN_BYTES = 8192, 1024
FLAT_RANKS, GROUP_RANKS = 4, 8


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def even_parts(whole: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by one at most."""
    return tuple(whole * (part + 1) // parts - whole * part // parts for part in range(parts))


@dataclass(frozen=True)
class Host:
    """Ranks on the nodes of memory of a host, as many on each."""

    ranks: int
    nodes: int

    def node_sizes(self) -> tuple[int, ...]:
        return even_parts(self.ranks, self.nodes)

    def group_sizes(self) -> tuple[tuple[int, ...], ...]:
        """By node, the groups that a small all-reduce goes through."""
        return tuple(even_parts(size, _ceil_div(size, GROUP_RANKS)) for size in self.node_sizes())

    def pairs(self) -> Count:
        """Of different ranks, in both orders."""
        return Count(self.ranks * (self.ranks - 1), self.ranks**2 - sum(size**2 for size in self.node_sizes()))


@dataclass(frozen=True)
class Count:
    """How much moves from one rank to another; `far`: the part of it between ranks on different nodes."""

    total: int = 0
    far: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.total + other.total, self.far + other.far)

    def __mul__(self, factor: int) -> Count:
        return Count(self.total * factor, self.far * factor)

    def __floordiv__(self, divisor: int) -> Count:
        return Count(self.total // divisor, self.far // divisor)


@dataclass(frozen=True)
class Moved:
    """By one all-reduce on one host, the mean of many."""

    lines: Count  # cache lines of posts, sums that are handed on, and of who is done with what
    block_bytes: Count  # of ranks' blocks of data
    # The longest way to the total: lines of which each is read by the same rank as the one before, or once that has
    # been. None for blocks, which all ranks read at once, piece by piece.
    in_a_row: int | None


def flat(host: Host, nbytes: int) -> Moved:
    """Every rank reads what every other one has written."""
    pairs = host.pairs()
    if nbytes <= EAGER_BYTES:
        lines = 2 + _ceil_div(nbytes, LINE_BYTES)
        return Moved(pairs * (lines + 1), Count(), (host.ranks - 1) * lines)
    return Moved(pairs * 4, pairs * (2 * nbytes) // host.ranks, None)


def grouped(host: Host, nbytes: int) -> Moved:
    """Few ranks as in flat, many from group to group and node to node."""
    pairs, others = host.pairs(), host.ranks - 1
    looks = pairs // SLOTS
    lines = _ceil_div(HEAD_BYTES + nbytes, LINE_BYTES)
    if host.ranks <= FLAT_RANKS and nbytes <= EAGER_BYTES:
        return Moved(pairs * lines + looks, Count(), others * lines)
    if nbytes <= CHAIN_BYTES:
        chain, in_a_row = _chain(host)
        return Moved(chain * lines + looks, Count(), in_a_row * lines)
    awaited = host.ranks - host.node_sizes()[0]
    by_blocks = Count(2 * others, 2 * (host.nodes - 1))
    return Moved(pairs * 2 + Count(awaited, awaited) + looks, by_blocks * nbytes, None)


def _chain(host: Host) -> tuple[Count, int]:
    """Messages from rank to rank, and how many of them one after the other."""
    by_node = host.group_sizes()
    groups = [size for node in by_node for size in node]
    # A sum is handed over the link from node to node, and the total to each leader of the other nodes.
    far = host.nodes - 1 + len(groups) - len(by_node[-1])
    largest = max(groups)
    in_a_row = largest - 1 + len(groups) - 1 + (1 if len(groups) > 1 else 0) + (1 if largest > 1 else 0)
    return Count(2 * (host.ranks - 1), far), in_a_row


def moved(scheme: str, host: Host, nbytes: int) -> Moved:
    """What one all-reduce of so many bytes moves, by the name of a scheme."""
    return flat(host, nbytes) if scheme == "flat" else grouped(host, nbytes)
