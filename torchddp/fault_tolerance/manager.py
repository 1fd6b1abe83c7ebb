"""A torchft Manager: checks its methods, counts a step's replicas, and tests whether its lighthouse answers."""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from typing import Any
from urllib.parse import urlsplit

from torchddp.durations import Duration, seconds
from torchddp.errors import TransportError

ADDRESS_ENV = "TORCHFT_LIGHTHOUSE"
# The required methods of torchft.Manager, in 0.2.0 and the nightlies of 2026.
_NEEDED = ("allreduce", "current_step", "errored", "num_participants", "report_error")


def check_manager(manager: Any, who: str) -> None:
    """TypeError for anything without a torchft Manager's methods, ValueError for a Manager without a process group."""
    missing = [name for name in _NEEDED if not callable(getattr(manager, name, None))]
    if inspect.isclass(manager) or missing:
        what = f"the class {manager.__name__}" if inspect.isclass(manager) else f"a {type(manager).__name__}"
        lacks = f", which has no {', '.join(missing)}" if missing else ""
        raise TypeError(f"{who}(manager, module): manager must be a torchft.Manager, got {what}{lacks}")
    if getattr(manager, "_pg", manager) is None:
        raise ValueError(
            f"{who}: this torchft Manager has no process group (pg=None). Make it with one that torchft can "
            "reconfigure: torchft.Manager(pg=torchft.ProcessGroupGloo(), ...), or ProcessGroupNCCL for CUDA."
        )


def count_participants(manager: Any) -> int:
    """The number of replicas that this step averages over; waits for the quorum within the manager's time limits.

    RuntimeError: no quorum was started. TransportError: none was reached, for example because the lighthouse is gone.
    """
    try:
        count = manager.num_participants()
    except Exception as error:
        raise TransportError(_no_quorum(manager, error)) from error
    if count < 1 and manager.errored() is None:
        raise RuntimeError(
            "backward() before manager.start_quorum(): start every step with it, or wrap the optimizer "
            "(torchft.Optimizer(manager, optimizer)) and call its zero_grad() before forward"
        )
    return max(count, 1)


def _no_quorum(manager: Any, error: Exception) -> str:
    replica = getattr(manager, "_replica_id", None)
    step = manager.current_step()
    text = f"replica {replica or '?'}, step {step}: torchft found no quorum: {error}"
    address = os.environ.get(ADDRESS_ENV, "")
    with contextlib.suppress(ValueError):
        if address and (problem := why_unreachable(address)):
            text += f". {problem[0].upper()}{problem[1:]}"
    return f"{text}. Restart the lighthouse, then this replica: the others heal it."


def check_lighthouse(address: str | None = None, timeout_s: Duration = 3.0) -> str:
    """Raise unless something listens at the lighthouse's address. Not collective.

    torchft itself detects this only after its ``connect_timeout`` (60 s by default).

    Args:
        address: "http://host:port"; None: the environment variable TORCHFT_LIGHTHOUSE.
        timeout_s: seconds (or a timedelta) to wait for a connection.

    Returns:
        The address.

    Raises:
        ValueError: no address, or one without scheme, host or port.
        RuntimeError: no answer from that address.
    """
    address = os.environ.get(ADDRESS_ENV, "") if address is None else address
    if not address:
        raise ValueError(
            f"there is no lighthouse: start one ('torchft_lighthouse --min_replicas 1') and set {ADDRESS_ENV} to its "
            "address, http://host:port"
        )
    if problem := why_unreachable(address, seconds(timeout_s, "timeout_s")):
        raise RuntimeError(f"{problem}. Start it with 'torchft_lighthouse --bind \"[::]:PORT\" --min_replicas 1'.")
    return address


def why_unreachable(address: str, timeout_s: float | None = 3.0) -> str:
    """Why the address can't be reached; empty if it can. ValueError for an invalid address."""
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
