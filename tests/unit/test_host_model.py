"""The model of what ranks of a host move: against counts by hand, and against the schemes acted out line by line."""

import io
import json
import re
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.host_model import cli, model
from benchmarks.host_model.model import Count, Host, flat, grouped
from benchmarks.host_model.report import bytes_text, render
from benchmarks.host_model.results import compare, model_rows
from torchddp.harness.machine import new_document

HOSTS = [(2, 1), (4, 1), (5, 1), (8, 1), (9, 1), (17, 1), (128, 1), (4, 2), (8, 2), (17, 2), (64, 2), (96, 4), (128, 2)]


class Caches:
    """Who has which line: a line moves when a rank reads what another one wrote since its last look."""

    def __init__(self, host: Host) -> None:
        sizes = host.node_sizes()
        self.node = [node for node, size in enumerate(sizes) for _ in range(size)]
        self.writer: dict[Hashable, int] = {}
        self.holders: dict[Hashable, set[int]] = defaultdict(set)
        self.total = self.far = 0

    def write(self, rank: int, line: Hashable) -> None:
        self.writer[line] = rank
        self.holders[line] = {rank}

    def read(self, rank: int, line: Hashable) -> None:
        writer = self.writer[line]
        if rank not in self.holders[line]:
            self.holders[line].add(rank)
            self.total += 1
            self.far += self.node[rank] != self.node[writer]

    @property
    def count(self) -> Count:
        return Count(self.total, self.far)


def lead(host: Host) -> list[range]:
    """The groups of ranks of a chain."""
    first, groups = 0, []
    for node in host.group_sizes():
        for size in node:
            groups.append(range(first, first + size))
            first += size
    return groups


@pytest.mark.parametrize(("ranks", "nodes"), HOSTS)
def test_flat_lines_are_those_of_everybody_reading_everybody(ranks: int, nodes: int) -> None:
    host = Host(ranks, nodes)
    caches = Caches(host)
    for rank in range(ranks):
        for line in ("count", "post", "done", *range(16)):
            caches.write(rank, (rank, line))
    for reader in range(ranks):
        for rank in range(ranks):
            for line in ("count", "post", "done", *range(16)):
                caches.read(reader, (rank, line))
    assert flat(host, 1024).lines == caches.count


@pytest.mark.parametrize(("ranks", "nodes"), [host for host in HOSTS if host[0] > 4])
@pytest.mark.parametrize(("nbytes", "lines"), [(4, 1), (32, 1), (64, 2), (1024, 17)])
def test_chain_lines_are_those_of_sums_handed_from_leader_to_leader(
    ranks: int, nodes: int, nbytes: int, lines: int
) -> None:
    host = Host(ranks, nodes)
    caches = Caches(host)
    groups = lead(host)
    assert [rank for group in groups for rank in group] == list(range(ranks))
    assert max(map(len, groups)) <= 8
    assert all(len({caches.node[rank] for rank in group}) == 1 for group in groups)

    def take(rank: int, giver: int, what: str) -> None:
        for line in range(lines):
            caches.read(rank, (giver, what, line))

    def give(rank: int, what: str) -> None:
        for line in range(lines):
            caches.write(rank, (rank, what, line))

    for rank in range(ranks):
        give(rank, "post")
    for before, group in zip([None, *groups], groups, strict=False):
        for rank in group:
            take(group[0], rank, "post")
        if before is not None:
            take(group[0], before[0], "partial")
        give(group[0], "total" if group == groups[-1] else "partial")
    for group in groups:
        if group != groups[-1]:
            take(group[0], groups[-1][0], "total")
            give(group[0], "total")
        for rank in group[1:]:
            take(rank, group[0], "total")
    assert grouped(host, nbytes).lines == caches.count + host.pairs() // 64
    assert caches.total == 2 * (ranks - 1) * lines


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (4, 2), (8, 2), (16, 2), (32, 4)])
def test_block_bytes_are_those_of_parts_summed_by_their_owners(ranks: int, nodes: int) -> None:
    host = Host(ranks, nodes)
    unit = 64  # bytes of each of `ranks` pieces of a block
    caches = Caches(host)
    for rank in range(ranks):
        for piece in range(ranks):
            caches.write(rank, (rank, piece))
    for owner in range(ranks):
        for rank in range(ranks):
            caches.read(owner, (rank, owner))
        for rank in range(ranks):
            caches.write(owner, (rank, owner))
    for rank in range(ranks):
        for piece in range(ranks):
            caches.read(rank, (rank, piece))
    nbytes = 1 << 20
    assert flat(host, nbytes).block_bytes == caches.count * unit * nbytes // (ranks * unit)


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (4, 2), (8, 2), (16, 2), (32, 4)])
def test_block_bytes_are_those_of_partial_sums_handed_from_node_to_node(ranks: int, nodes: int) -> None:
    host = Host(ranks, nodes)
    caches = Caches(host)
    size = ranks // nodes
    for rank in range(ranks):
        for piece in range(size):
            caches.write(rank, (rank, piece))
    for piece in range(size):
        for node in range(nodes):
            owner = node * size + piece
            for rank in range(node * size, (node + 1) * size):
                caches.read(owner, (rank, piece))
            if node > 0:
                caches.read(owner, (owner - size, piece))
            for rank in [owner] if node + 1 < nodes else range(node * size, (node + 1) * size):
                caches.write(owner, (rank, piece))
        for node in range(nodes - 1):
            owner = node * size + piece
            caches.read(owner, ((nodes - 1) * size + piece, piece))
            for rank in range(node * size, (node + 1) * size):
                caches.write(owner, (rank, piece))
    for rank in range(ranks):
        for piece in range(size):
            caches.read(rank, (rank, piece))
    nbytes = 1 << 20
    assert grouped(host, nbytes).block_bytes == caches.count * nbytes // size


def test_small_hosts_counted_by_hand() -> None:
    # Three ranks: six pairs; a count, a post, a line of 64 bytes and a tally, or two lines with a head.
    assert flat(Host(3, 1), 64).lines == Count(24)
    assert grouped(Host(3, 1), 64).lines == Count(12)
    # Nine ranks are groups of four and five: 3 + 4 posts, one partial, one total across, 3 + 4 totals.
    chain = grouped(Host(9, 1), 4)
    assert chain.lines == Count(16 + 1)  # 72 pairs look once in 64 operations
    assert chain.in_a_row == 4 + 1 + 1 + 1
    # Eight on two nodes: the partial and the total cross, nothing else.
    assert grouped(Host(8, 2), 4).lines == Count(14, 2)
    # Two nodes of two: each owner reads a block of its node and the partial or the total, half of the bytes each.
    assert grouped(Host(4, 2), 1 << 20).block_bytes == Count(6 << 20, 2 << 20)
    assert flat(Host(4, 2), 1 << 20).block_bytes == Count(6 << 20, 4 << 20)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("layout.h", "kEagerBytes", model.EAGER_BYTES),
        ("layout.h", "kChainBytes", model.CHAIN_BYTES),
        ("layout.h", "kSlots", model.SLOTS),
        ("operation.cpp", "kFlatRanks", model.FLAT_RANKS),
        ("groups.cpp", "kSmall", model.GROUP_RANKS),
    ],
)
def test_the_limits_are_those_of_the_engine(file: str, name: str, value: int) -> None:
    source = (Path(__file__).parents[2] / "csrc" / "shm" / file).read_text()
    (found,) = re.findall(rf"constexpr \w+ {name} = (\d+);", source)
    assert int(found) == value


def test_schemes_change_at_the_limits() -> None:
    assert grouped(Host(4, 1), 8192).in_a_row is not None
    assert grouped(Host(4, 1), 8193).in_a_row is None
    assert grouped(Host(5, 1), 1024).in_a_row is not None
    assert grouped(Host(5, 1), 1025).in_a_row is None


ROW = {"ranks": 16, "nodes": 2, "message_bytes": 64, "lines": 64, "far_lines": 6, "bytes": 0, "far_bytes": 0}


def test_counts_stand_beside_the_model() -> None:
    large = ROW | {"message_bytes": 1 << 20, "bytes": 30 << 20, "far_bytes": 1 << 20}
    compared = compare([ROW, large])
    assert compared[0]["lines"] == {"counted": 64, "model": 63}
    assert compared[0]["far_lines"] == {"counted": 6, "model": 6}
    assert compared[1]["bytes"] == {"counted": 30 << 20, "model": 30 << 20}
    assert compared[1]["far_bytes"] == {"counted": 1 << 20, "model": 2 << 20}
    document = new_document("python -m benchmarks.host_model", {})
    document |= {"results": model_rows([16], [1, 2], [64, 64 << 20]), "counts": compared}
    out = io.StringIO()
    Console(file=out, width=100).print(render(document))
    for words in ("One all-reduce of 64 B, 2 nodes", "of 64 MiB, 1 node", "64 / 63 lines", "64 B, 16 ranks, 2 nodes"):
        assert words in out.getvalue()


def test_sizes_in_words() -> None:
    assert [bytes_text(nbytes) for nbytes in (64, 1024, 3 << 19, 64 << 20, 8 << 30)] == [
        "64 B",
        "1 KiB",
        "1.5 MiB",
        "64 MiB",
        "8 GiB",
    ]


def test_the_command_writes_the_model_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = tmp_path / "counts.jsonl"
    counts.write_text(json.dumps(ROW) + "\n")
    path, plot = tmp_path / "model.json", tmp_path / "model.png"
    arguments = ["--ranks", "8", "--nodes", "2", "--bytes", "64", "--counts", str(counts)]
    assert cli.main([*arguments, "--json", str(path), "--plot", str(plot)]) == 0
    document = json.loads(path.read_text())
    assert {(row["scheme"], row["lines"], row["far_lines"]) for row in document["results"]} == {
        ("flat", 224, 128),
        ("grouped", 28, 4),
    }
    assert document["counts"][0]["lines"] == {"counted": 64, "model": 63}
    assert plot.stat().st_size > 0
    assert "64 / 63" in capsys.readouterr().out


def test_the_command_says_what_it_wants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--ranks", "1"]) == 2
    assert "--ranks wants 2 to 256, not 1." in capsys.readouterr().err
    counts = tmp_path / "counts.jsonl"
    counts.write_text('{"ranks": 2}')
    assert cli.main(["--counts", str(counts)]) == 2
    assert "KeyError 'nodes'" in capsys.readouterr().err
