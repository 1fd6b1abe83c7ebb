"""Chooses how large gradients travel over NCCL, from what NCCL can do on these hosts. Nothing here communicates."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

# What the choice is calculated from, in GB/s: an H100's NVLink in one direction, and its memory.
LINK_GB_S = 360.0
MEMORY_GB_S = 2900.0
# NCCL's model of NVLS: sums over it take 6/5 of the time in which the links pass the data once.
_NVLS_PASSES = 1.2
_NVLS_LEAST_RANKS = 3  # on a host; for two, which NCCL after 2.30 allows, this model prefers the ring anyway


@dataclasses.dataclass(frozen=True)
class NcclChoice:
    """What the ranks of a communicator do with gradients of 1 MiB or more, and with the memory of buckets, and why.

    Attributes:
        in_place: each is reduced where autograd made it, scaled by NCCL (PreMulSum). Otherwise all gradients are
            packed into buckets, which are plain sums.
        reason: for ``in_place``.
        memory: why buckets are in torch's memory, which NCCL doesn't know, and are not registered with it.
    """

    in_place: bool
    reason: str
    memory: str

    def __str__(self) -> str:
        large = "reduces large gradients in place" if self.in_place else "packs all gradients"
        return f"{large}: {self.reason}. Buckets are not registered with NCCL: {self.memory}"


def choose(ranks_of_hosts: Sequence[int], *, nvls: bool, sharp: bool) -> NcclChoice:
    """Choose for a communicator with one GPU per rank. Pure: ranks that pass the same get the same.

    NCCL sums in the switch (NVLS, SHARP) only plain sums, so gradients that it has to scale never profit.

    Args:
        ranks_of_hosts: how many ranks each host has.
        nvls: NCCL may use NVLink SHARP on every rank: see `may_use_nvls`.
        sharp: NCCL may use SHARP of the network on every rank: see `may_use_sharp`.
    """
    size, hosts = sum(ranks_of_hosts), len(ranks_of_hosts)
    nvls = nvls and min(ranks_of_hosts) >= _NVLS_LEAST_RANKS
    if size == 1:
        return NcclChoice(True, "there is one rank", "there is one rank")
    if nvls:
        memory = "over NVLS each call would wait on the host for its other ranks, and no abort ends that"
    elif sharp and hosts > 1:
        memory = "no machine with SHARP has tested it"
    else:
        memory = "NCCL's rings and trees make no use of that for sums in place"
    if hosts == 1 and nvls:
        ring, switch, packing = milliseconds_per_gb(size)
        times = f"{ring:.1f} ms per GB over a ring, {switch:.1f} over NVLS and {packing:.1f} to pack, by NCCL's model"
        return NcclChoice(ring <= switch + packing, f"{size} ranks of one host need {times}", memory)
    if hosts == 2 and nvls:
        return NcclChoice(False, "between two hosts with NVLS, each byte crosses the network once, not twice", memory)
    if hosts > 1 and sharp:
        return NcclChoice(False, "with SHARP, each byte crosses the network once, not twice", memory)
    return NcclChoice(True, "NCCL's rings and trees scale for free", memory)


def milliseconds_per_gb(ranks: int) -> tuple[float, float, float]:
    """Of ranks on one host: to sum fp32 gradients over a ring and over NVLS, and to pack them, which reads and writes.

    With the rates of an H100; a model, not measured.
    """
    ring = 2 * (ranks - 1) / ranks / LINK_GB_S
    return 1e3 * ring, 1e3 * _NVLS_PASSES / LINK_GB_S, 1e3 * 2 / MEMORY_GB_S


def may_use_nvls(has_multicast: bool, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether NCCL may sum in the NVLink switch on this rank, by its GPU and NCCL_NVLS_ENABLE and NCCL_ALGO."""
    wanted = environment.get("NCCL_ALGO", "").lower()
    excluded = wanted.startswith("^") == ("nvls" in wanted) if wanted else False
    return has_multicast and environment.get("NCCL_NVLS_ENABLE", "2") != "0" and not excluded


def may_use_sharp(settings: Mapping[str, int], environment: Mapping[str, str] = os.environ) -> bool:
    """Whether NCCL may sum in the network, by the group's options (collnet_enable) or NCCL_COLLNET_ENABLE."""
    return settings.get("collnet_enable", 0) == 1 or environment.get("NCCL_COLLNET_ENABLE", "0") == "1"
