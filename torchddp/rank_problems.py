"""What went wrong on which ranks, in one line."""

from __future__ import annotations

from collections.abc import Sequence


def listed(by_rank: Sequence[str]) -> str:
    """The different problems, each with its ranks: what one rank can't do, all others may complain of. "" for none."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problem in enumerate(by_rank):
        if problem:
            ranks_of.setdefault(problem, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {problem}" for problem, ranks in ranks_of.items())
