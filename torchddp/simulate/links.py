"""What connects hosts (or the devices of one): presets, and rates a user gives."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchddp.harness.variants import ArgumentError


@dataclass(frozen=True)
class Link:
    """A host's connection to the others, shared by its ranks; inside a host: a rank's connection to the others.

    `bytes_per_s` is per direction, of what a program sends. `latency_s` is for one message, one way, without the CPU
    time of the two ends, which a profile knows. None: as it was when the profile was recorded.
    """

    name: str
    title: str
    bytes_per_s: float | None
    latency_s: float | None


# Of a full Ethernet frame (1538 bytes with preamble and gap) 1448 are the program's: TCP with time stamps, MTU 1500.
_TCP_SHARE = 1448 / 1538

MEASURED = Link("measured", "the recorded link", None, None)
PRESETS = {
    link.name: link
    for link in (
        # 18 links of 25 GB/s, of which NCCL counts on 20.6 (SM90_NVLINK_BW in its topo.h); 1.9 us is a step of its
        # ring over NVLink with the LL128 protocol (hwLat in its tuning.cc).
        Link("nvlink", "NVLink of an H100", 18 * 20.6e9, 1.9e-6),
        # 48.5 of 50 GB/s is what the simulator SimAI counts on for a ConnectX-7 (calbusbw.h); 4.0 us: hwLat again, over
        # a network.
        Link("ib400", "InfiniBand 400 Gbit/s, one port a host", 48.5e9, 4.0e-6),
        # Latencies over Ethernet differ more between sites than between rates. For 1 Gbit/s AppNeta (2009) gives 120 to
        # 180 us for a round trip between programs, a third of it sending the frames: half of the rest is one way.
        # 25 us and 10 us are our guesses between that and InfiniBand: who knows better gives a rate and a latency.
        Link("eth100", "Ethernet 100 Gbit/s, TCP", 12.5e9 * _TCP_SHARE, 10e-6),
        Link("eth10", "Ethernet 10 Gbit/s, TCP", 1.25e9 * _TCP_SHARE, 25e-6),
        Link("eth1", "Ethernet 1 Gbit/s, TCP", 0.125e9 * _TCP_SHARE, 50e-6),
    )
}
NVLINK = PRESETS["nvlink"]
# What is shown when no link is asked for: those that reach other hosts.
NETWORKS = tuple(name for name in PRESETS if name != "nvlink")

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])bit", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_link(text: str) -> Link:
    """A preset's name, `measured`, or a rate with an optional latency: `25gbit,15us`. ArgumentError for anything else.

    A rate given so is the line's: what TCP needs for headers is taken off, as from the Ethernet presets.
    """
    name = text.strip().lower()
    if name == MEASURED.name:
        return MEASURED
    if name in PRESETS:
        return PRESETS[name]
    rate_text, comma, latency_text = name.partition(",")
    rate, latency = _RATE.fullmatch(rate_text.strip()), _LATENCY.fullmatch(latency_text.strip())
    if rate is None or (comma and latency is None):
        raise ArgumentError(
            f"There is no link '{text}'; choose from {', '.join((*PRESETS, MEASURED.name))}, or give a rate and maybe "
            "a latency, like 25gbit or 25gbit,15us."
        )
    bytes_per_s = float(rate[1]) * _BITS[rate[2]] / 8 * _TCP_SHARE
    if bytes_per_s <= 0:
        raise ArgumentError(f"The link '{text}' carries nothing: its rate must be above 0.")
    if latency is None:
        return Link(name, f"{rate_text}, latency as recorded", bytes_per_s, None)
    return Link(name, f"{rate_text}, {latency_text}", bytes_per_s, float(latency[1]) * _SECONDS[latency[2]])
