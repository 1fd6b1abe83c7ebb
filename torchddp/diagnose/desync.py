"""Which parameters differ between ranks, found in their hashes, and how that is told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchddp.errors import DesyncError


@dataclass(frozen=True)
class Difference:
    """The first parameter that differs, in the order of registration."""

    index: int
    reference_rank: int  # one whose value the others are held against
    ranks: tuple[int, ...]  # that have another
    count: int  # parameters that differ in all


@dataclass(frozen=True)
class Amount:
    """How far a rank's parameter is from the reference."""

    elements: int  # whose bits differ
    largest: float  # difference, of those that are finite on both


def find_difference(by_rank: Sequence[Sequence[object]]) -> Difference | None:
    """From ``by_rank[rank][parameter]``, equal where the parameters are. The reference is what most ranks have.

    Without a majority it is what rank 0 has.
    """
    differing = [index for index, values in enumerate(zip(*by_rank, strict=True)) if len(set(values)) > 1]
    if not differing:
        return None
    values = [own[differing[0]] for own in by_rank]
    most, votes = Counter(values).most_common(1)[0]
    reference = most if votes * 2 > len(values) else values[0]
    ranks = tuple(rank for rank, value in enumerate(values) if value != reference)
    return Difference(differing[0], values.index(reference), ranks, len(differing))


def make_error(
    difference: Difference,
    name: str,
    parameter: str,
    world_size: int,
    num_parameters: int,
    amounts: Sequence[Amount] | None,
    steps: int,
) -> DesyncError:
    """The error of all ranks; `parameter` describes it, `amounts` are by rank, None where they were not found out."""
    others = [rank for rank in range(world_size) if rank not in difference.ranks]
    majority = len(others) * 2 > world_size
    parts = []
    largest = None
    for rank, amount in ((rank, amounts[rank]) for rank in difference.ranks) if amounts is not None else ():
        largest = amount.largest if largest is None else max(largest, amount.largest)
        plural = "s" if amount.elements != 1 else ""
        parts.append(f"rank {rank} in {amount.elements} element{plural}, by up to {amount.largest:.6g}")
    told = f" ({'; '.join(parts)})" if parts else ""
    verb = "differ" if len(difference.ranks) > 1 else "differs"
    most = ", most of the ranks" if majority else ""
    compared = f"{_ranks(difference.ranks)} {verb} from {_ranks(others)}{most}{told}"
    text = (
        f"Parameters are not the same on all ranks after {steps} synchronised steps: {difference.count} of "
        f"{num_parameters} differ. The first is '{name}' ({parameter}): {compared}. Likely causes: a rank whose "
        "optimizer, learning rate or gradient clipping is another, or that skipped a step; parameters that were "
        "loaded, set or initialised on some ranks only; gradients changed after backward; results that depend on the "
        "rank's hardware; a faulty machine. To go on, broadcast the parameters of a rank that is right, and its "
        "optimizer's state."
    )
    return DesyncError(text, steps, name, difference.ranks, difference.count, largest)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
