"""How far the clocks of ranks are apart.

Ranks of one host read one CLOCK_MONOTONIC, and there is nothing to measure. Between hosts it is Cristian's argument
over collectives: nobody leaves an all-reduce before everybody has entered it. A rank's leaving minus another's entering
bounds the offset of their clocks from one side, and the other way round from the other; many rounds narrow the bounds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = 32

# When a rank entered and left each round, in ns of its own clock.
Readings = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Clock:
    """Add `offset_ns` to a time of this rank to have it on rank 0's clock; wrong by `uncertainty_ns` at most."""

    offset_ns: int = 0
    uncertainty_ns: int = 0


def clock_identity() -> str:
    """Equal for processes that read the same CLOCK_MONOTONIC: same boot, same time namespace."""
    parts = []
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: str(Path("/proc/self/ns/time").readlink()),
    ):
        try:
            parts.append(read())
        except OSError:
            parts.append("unknown")
    return " ".join([socket.gethostname() if parts[0] == "unknown" else "", *parts]).strip()


def align(identities: Sequence[str], readings: Sequence[Readings]) -> list[Clock]:
    """The clock of each rank against rank 0's.

    Args:
        identities: `clock_identity()` of each rank.
        readings: of each rank; all have the same number of rounds. Empty where all identities are equal.
    """
    reference = identities[0]
    members: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        members.setdefault(identity, []).append(rank)
    clocks = {
        identity: Clock() if identity == reference else _bounded(members[reference], ranks, readings)
        for identity, ranks in members.items()
    }
    return [clocks[identity] for identity in identities]


def _bounded(here: Sequence[int], there: Sequence[int], readings: Sequence[Readings]) -> Clock:
    """What all pairs and rounds say about: time here minus time there."""
    low: float = float("-inf")
    high: float = float("inf")
    for a in here:
        for b in there:
            for (entered_a, left_a), (entered_b, left_b) in zip(readings[a], readings[b], strict=True):
                low = max(low, entered_a - left_b)
                high = min(high, left_a - entered_b)
    if not low > float("-inf"):
        raise ValueError("the clocks of different hosts cannot be aligned without readings")
    # Clocks that drift apart during the rounds may leave nothing between the bounds: then these are the error.
    return Clock(round((low + high) / 2), round(abs(high - low) / 2))


def take_readings(group: Any, device: Any, rounds: int = ROUNDS) -> Readings:
    """When this rank entered and left each of some small all-reduces. Collective."""
    import torch
    import torch.distributed as dist

    token = torch.ones(1, device=device)
    readings = []
    for _ in range(rounds):
        entered_ns = time.monotonic_ns()
        dist.all_reduce(token, op=dist.ReduceOp.MAX, group=group)
        token.item()  # on a device the all-reduce is only queued before
        readings.append((entered_ns, time.monotonic_ns()))
    return readings
