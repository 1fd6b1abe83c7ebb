"""Bytes that a step sends."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one synchronised step on this rank.

    Attributes:
        payload_bytes: gradients that were given to be reduced.
        wire_bytes: what this rank handed to the network or to shared memory for it, headers not counted; None: unknown.
    """

    payload_bytes: int
    wire_bytes: int | None
