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


# Ends the error of a wait outside of a reduction, which says as much itself.
ADVICE_FOR_A_LOST_PEER = (
    "If ranks have different numbers of batches, give all of them as many (torchddp.sync.even_batches, a sampler with "
    "drop_last=True), or train a DistributedDataParallel under `with model.join():`. Otherwise a peer has died, left, "
    "or did not reach this step in time: look at the other ranks' logs for the first error."
)
