"""Closed formulas for the data that an fp32 all-reduce moves between the processors of one host. Pure.

A line moves when a rank reads a cache line that another rank has written since its last read. W ranks run on NUMA
nodes, consecutive ranks on the same one. P = W (W - 1) is the number of ordered pairs of different ranks; lines of
pairs on two nodes cross the link. We assume that every poll succeeds at once: polling a line before it is written moves
it once more.

flat, which torchddp formerly used for any number of ranks: every rank reads what every other rank has written.
    up to 8 KB  Its operation count, its post, ceil(bytes / 64) lines of input, and its own reading progress:
                P (3 + ceil(bytes / 64)) lines.
    above       Rank r sums part r of W of all blocks and writes it to all of them. The sums read W - 1 times the bytes
                of other ranks' blocks, and owners read as much again to get the results. Operation counts, posts,
                "my part is done" and progress take 4 P lines.

grouped, which it uses now:
    up to 4 ranks and 8 KB
                As above; but a post marks itself as present, and its first line has room for 32 bytes of input:
                P L lines, where L = ceil((32 + bytes) / 64).
    up to 1 KB  G groups of up to 8 ranks of a node. A leader reads its group's posts and the preceding groups' sum,
                (W - G) L and (G - 1) L lines. The last leader has the total; the other leaders read it there, and
                their groups from them: (G - 1) L and (W - G) L lines. In total 2 (W - 1) L.
    above       On each of N nodes one rank owns a chunk: it reads its node's blocks and the sum of the nodes before,
                (W - N) and (N - 1) times the bytes, and the total takes the same way back. In total 2 (W - 1) times
                the bytes, as in flat, but only 2 (N - 1) times across the link. Posts and "my chunks are done" take
                2 P lines, and each owner outside the first node reads whether the preceding sum is ready.
    always      Every 64 operations, each rank checks the progress of every other: P / 64 lines.
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
    """Splits `whole` into sizes that differ by at most one."""
    return tuple(whole * (part + 1) // parts - whole * part // parts for part in range(parts))


@dataclass(frozen=True)
class Host:
    """The ranks of a host, spread evenly over its NUMA nodes."""

    ranks: int
    nodes: int

    def node_sizes(self) -> tuple[int, ...]:
        return even_parts(self.ranks, self.nodes)

    def group_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The groups of a small all-reduce, by node."""
        return tuple(even_parts(size, _ceil_div(size, GROUP_RANKS)) for size in self.node_sizes())

    def pairs(self) -> Count:
        """Ordered pairs of different ranks."""
        return Count(self.ranks * (self.ranks - 1), self.ranks**2 - sum(size**2 for size in self.node_sizes()))


@dataclass(frozen=True)
class Count:
    """The amount that moves between ranks; `far`: the part between ranks on different nodes."""

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
    """The data moved by one all-reduce on one host, averaged over many."""

    lines: Count  # cache lines of posts, of forwarded sums and of progress
    block_bytes: Count  # of the ranks' data blocks
    # The critical path to the total, in lines that must be read one after another. None for blocks, which all ranks
    # read at once, piece by piece.
    in_a_row: int | None


def flat(host: Host, nbytes: int) -> Moved:
    """Every rank reads what every other rank has written."""
    pairs = host.pairs()
    if nbytes <= EAGER_BYTES:
        lines = 2 + _ceil_div(nbytes, LINE_BYTES)
        return Moved(pairs * (lines + 1), Count(), (host.ranks - 1) * lines)
    return Moved(pairs * 4, pairs * (2 * nbytes) // host.ranks, None)


def grouped(host: Host, nbytes: int) -> Moved:
    """Few ranks as in flat; many ranks from group to group and node to node."""
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
    """The number of messages between ranks, and how many of them are sequential."""
    by_node = host.group_sizes()
    groups = [size for node in by_node for size in node]
    # A sum crosses the link from node to node, and the total goes to each leader of the other nodes.
    far = host.nodes - 1 + len(groups) - len(by_node[-1])
    largest = max(groups)
    in_a_row = largest - 1 + len(groups) - 1 + (1 if len(groups) > 1 else 0) + (1 if largest > 1 else 0)
    return Count(2 * (host.ranks - 1), far), in_a_row


def moved(scheme: str, host: Host, nbytes: int) -> Moved:
    """The data that one all-reduce of `nbytes` moves in the named scheme."""
    return flat(host, nbytes) if scheme == "flat" else grouped(host, nbytes)
