"""The model of memory traffic on a host against counts by hand and the limits in csrc/shm."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.host_model import cli, model
from benchmarks.host_model.model import Count, Host, flat, grouped


def test_traffic_on_small_hosts_matches_counts_by_hand() -> None:
    # Three ranks: six pairs. Flat: a count, a post, a line of 64 bytes and a tally; grouped: two lines with a head.
    assert flat(Host(3, 1), 64).lines == Count(24)
    assert grouped(Host(3, 1), 64).lines == Count(12)
    # Nine ranks are groups of four and five: 3 + 4 posts, one partial, one total across, 3 + 4 totals.
    chain = grouped(Host(9, 1), 4)
    assert chain.lines == Count(16 + 1)  # each of 72 pairs polls once per 64 operations
    assert chain.in_a_row == 4 + 1 + 1 + 1
    # Eight on two nodes: only the partial and the total cross.
    assert grouped(Host(8, 2), 4).lines == Count(14, 2)
    # Two nodes of two: each owner reads a block of its node, and the partial or the total, each half of the bytes.
    assert grouped(Host(4, 2), 1 << 20).block_bytes == Count(6 << 20, 2 << 20)
    assert flat(Host(4, 2), 1 << 20).block_bytes == Count(6 << 20, 4 << 20)
    for ranks, limit_bytes in ((4, 8192), (5, 1024)):
        assert grouped(Host(ranks, 1), limit_bytes).in_a_row is not None, ranks
        assert grouped(Host(ranks, 1), limit_bytes + 1).in_a_row is None, ranks


def test_the_limits_match_the_constants_in_csrc() -> None:
    folder = Path(__file__).parents[2] / "csrc" / "shm"
    sources = [(folder / name).read_text() for name in ("layout.h", "operation.cpp", "groups.cpp")]
    found = dict(re.findall(r"constexpr \w+ (k\w+) = (\d+);", "".join(sources)))
    names = ("kEagerBytes", "kChainBytes", "kSlots", "kFlatRanks", "kSmall")
    limits = [model.EAGER_BYTES, model.CHAIN_BYTES, model.SLOTS, model.FLAT_RANKS, model.GROUP_RANKS]
    assert [int(found[name]) for name in names] == limits


ROW = {"ranks": 16, "nodes": 2, "message_bytes": 64, "lines": 64, "far_lines": 6, "bytes": 0, "far_bytes": 0}


def test_the_command_writes_the_model_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = tmp_path / "counts.jsonl"
    counts.write_text(json.dumps(ROW) + "\n")
    path, plot = tmp_path / "model.json", tmp_path / "model.png"
    arguments = ["--ranks", "8", "--nodes", "2", "--bytes", "64", "--counts", str(counts)]
    assert cli.main([*arguments, "--json", str(path), "--plot", str(plot)]) == 0
    document = json.loads(path.read_text())
    rows = {(row["scheme"], row["lines"], row["far_lines"]) for row in document["results"]}
    assert rows == {("flat", 224, 128), ("grouped", 28, 4)}
    assert document["counts"][0]["lines"] == {"counted": 64, "model": 63}
    assert plot.stat().st_size > 0
    assert "64 / 63" in capsys.readouterr().out
