"""Is torchft's lighthouse there? A question answered in seconds, before or after a quorum has failed."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

__all__ = ["check_lighthouse", "why_unreachable"]

ADDRESS_ENV = "TORCHFT_LIGHTHOUSE"


def check_lighthouse(address: str | None = None, timeout_s: float = 3.0) -> str:
    """Raise unless something listens at the lighthouse's address. Not collective.

    torchft itself notices only after its ``connect_timeout`` (60 s by default).

    Args:
        address: "http://host:port"; None: the environment variable TORCHFT_LIGHTHOUSE.
        timeout_s: seconds to wait for a connection.

    Returns:
        The address.

    Raises:
        ValueError: no address, or one without scheme, host or port.
        RuntimeError: nobody answers there.
    """
    address = os.environ.get(ADDRESS_ENV, "") if address is None else address
    if not address:
        raise ValueError(
            f"there is no lighthouse: start one ('torchft_lighthouse --min_replicas 1') and set {ADDRESS_ENV} to its "
            "address, http://host:port"
        )
    if problem := why_unreachable(address, timeout_s):
        raise RuntimeError(f"{problem}. Start it with 'torchft_lighthouse --bind \"[::]:PORT\" --min_replicas 1'.")
    return address


def why_unreachable(address: str, timeout_s: float = 3.0) -> str:
    """Why nobody can be reached at the address, or nothing. ValueError for what is no address."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not address.startswith(("http://", "https://")) or not host or not port:
        raise ValueError(f"a lighthouse's address is http://host:port, got {address!r}")
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return f"no lighthouse answers at {address} ({error})"
    return ""
