"""The model's rows, and a comparison with counts from the C++ tests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.host_model.model import SCHEMES, Host, moved

# The keys of a counted row, and the scheme that the library implements.
KEYS = ("ranks", "nodes", "message_bytes")
BUILT = "grouped"


def model_row(scheme: str, ranks: int, nodes: int, message_bytes: int) -> dict[str, Any]:
    """One all-reduce on one host."""
    by_one = moved(scheme, Host(ranks, nodes), message_bytes)
    return {
        "scheme": scheme,
        "ranks": ranks,
        "nodes": nodes,
        "message_bytes": message_bytes,
        "lines": by_one.lines.total,
        "far_lines": by_one.lines.far,
        "lines_in_a_row": by_one.in_a_row,
        "bytes": by_one.block_bytes.total,
        "far_bytes": by_one.block_bytes.far,
    }


def model_rows(ranks: Sequence[int], nodes: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """All combinations in which each node has at least one rank."""
    return [
        model_row(scheme, rank_count, node_count, message_bytes)
        for message_bytes in sizes
        for node_count in nodes
        for rank_count in ranks
        for scheme in SCHEMES
        if rank_count >= node_count
    ]


def compare(counts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pairs counts with the model's: lines for small all-reduces, bytes for those reduced in blocks."""
    compared = []
    for row in counts:
        of_model = model_row(BUILT, *(row[key] for key in KEYS))
        names = ("bytes", "far_bytes") if of_model["lines_in_a_row"] is None else ("lines", "far_lines")
        compared.append(
            {key: row[key] for key in KEYS} | {name: {"counted": row[name], "model": of_model[name]} for name in names}
        )
    return compared
