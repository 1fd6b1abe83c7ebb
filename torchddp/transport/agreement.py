"""Do all ranks shard the same parameters; if not, one error on every rank that names the first difference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchddp.transport.object_exchange import gather_objects
from torchddp.transport.rank_problems import listed
from torchddp.transport.waits import wait_for_work


def message_device(process_group: dist.ProcessGroup) -> torch.device:
    """Where messages that start on the CPU travel: there, if the group can."""
    types = {device.type for device in process_group._device_types}
    return torch.device("cpu" if "cpu" in types or not types else types.pop())


def verify_agreement(
    lines: Sequence[str],
    error: Exception | None,
    process_group: dist.ProcessGroup,
    device: torch.device,
    who: str = "OSS",
) -> None:
    """Collective. Raise on every rank if one failed (``error``), or if the descriptions in ``lines`` differ.

    A rank with an error raises that one, the others a RuntimeError which quotes it. Two integers per rank travel when
    all is well, the descriptions only when they differ.
    """
    if process_group.size() > 1:
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") >> 2
        mine = torch.tensor([digest, error is not None], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(process_group.size())]
        wait_for_work(dist.all_gather(gathered, mine, group=process_group, async_op=True), process_group)
        if any(bool(other[1]) or not torch.equal(other, gathered[0]) for other in gathered):
            _raise_difference(lines, error, process_group, who)
    if error is not None:
        raise error


def _raise_difference(
    lines: Sequence[str], error: Exception | None, process_group: dist.ProcessGroup, who: str
) -> None:
    problem = "" if error is None else f"{type(error).__name__}: {error}"
    by_rank = gather_objects((problem, list(lines)), process_group)
    if error is not None:
        raise error
    problems = [problem for problem, _ in by_rank]
    if any(problems):
        raise RuntimeError(f"{who} failed on other ranks: {listed(problems)}")
    raise RuntimeError(f"{who} needs the same parameters on all ranks. {first_difference([ls for _, ls in by_rank])}")


def first_difference(by_rank: Sequence[Sequence[str]]) -> str:
    """One sentence on the first rank that differs from rank 0, and where."""
    reference = by_rank[0]
    for rank, mine in enumerate(by_rank[1:], start=1):
        for theirs, ours in zip(reference, mine, strict=False):
            if theirs != ours:
                return f"On rank {rank} it is {ours}, on rank 0 {theirs}."
        if len(mine) != len(reference):
            longer, rest = (rank, mine) if len(mine) > len(reference) else (0, reference)
            extra = rest[min(len(mine), len(reference))]
            return (
                f"Rank {rank} has {len(mine)} parameters, rank 0 {len(reference)}: the first that only rank {longer} "
                f"has is {extra}."
            )
    return "No difference was found."
