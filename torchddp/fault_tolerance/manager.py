"""A torchft Manager: checks its methods, counts a step's replicas, and stands for them as a process group.

Note [A group of one]
~~~~~~~~~~~~~~~~~~~~~
Replicas come and go between steps, so the group has a single rank, this replica: nothing that assumes a fixed set of
ranks (agreeing on a plan, broadcasting weights) happens over it. Only sums go to the manager, which sends them to the
replicas that take part in the step. The reducer asks for their number when a backward begins, and scales by it while it
packs. The manager's own average would be another pass over the bucket after the last wait.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp import _torch
from torchddp.comm_hooks import CommHook
from torchddp.durations import Duration, seconds
from torchddp.errors import TransportError

ADDRESS_ENV = "TORCHFT_LIGHTHOUSE"
# The required methods of torchft.Manager, in 0.2.0 and the nightlies of 2026.
_NEEDED = ("allreduce", "current_step", "errored", "num_participants", "report_error")


class Manager(Protocol):
    """What torchddp calls of a torchft.Manager."""

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any = ...) -> dist.Work: ...
    def current_step(self) -> int: ...
    def errored(self) -> object: ...
    def num_participants(self) -> int: ...
    def should_commit(self) -> bool: ...
    def start_quorum(self) -> None: ...


def check_manager(manager: object, who: str) -> None:
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


def count_participants(manager: Manager) -> int:
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


def _no_quorum(manager: Manager, error: Exception) -> str:
    replica = getattr(manager, "_replica_id", None)
    text = f"replica {replica or '?'}, step {manager.current_step()}: torchft found no quorum: {error}"
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
        raise ValueError(f"there is no lighthouse: start torchft_lighthouse, and set {ADDRESS_ENV}=http://host:port")
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


class ManagerGroup(dist.ProcessGroup):
    """See Note [A group of one].

    ``sums_used``: whether maps of used parameters are summed over the replicas. ``refusal``: the error for averaging
    over this group, which would do nothing. ``failed``: whether a sum has failed since the last `take_failure`.
    """

    refusal = (
        "this is the process group of a model under a torchft Manager: only its gradients can go through it. "
        "torchddp.fault_tolerance.PeriodicAverager(manager, ...) averages parameters."
    )

    def __init__(self, manager: Manager) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stubs lack this one
        self.manager = manager
        self.sums_used = False
        self.failed = False

    def take_failure(self) -> bool:
        failed, self.failed = self.failed, False
        return failed

    def open_exchange(self, hook: CommHook) -> ManagerExchange:
        """For a communication hook. RuntimeError: it sends more than sums, which a manager doesn't support."""
        if not hook.sends_sums_only:
            name = type(hook).__name__
            raise RuntimeError(f"{name} sends messages between ranks, but a torchft Manager only sums: use PowerSGD")
        return ManagerExchange(self)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Start the sum of one tensor over the replicas. Never raises for a network error."""
        (tensor,) = tensors
        if not (tensor.is_floating_point() or tensor.is_complex() or self.sums_used):
            return _Done()
        return _ManagedSum(self, self.manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM), tensor)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Done()

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "torchft"


class ManagerExchange:
    """The part of `torchddp.comm_hooks.exchange.Exchange` that hooks with exact sums need. Not collective to create.

    A failed sum does not raise: its values are invalid, and the manager records the error.
    """

    rank = 0
    is_shared = True  # on the main thread's connection, like the sums of maps of used parameters
    is_alone = False  # a healing replica must get the others' sum, even if only one takes part

    def __init__(self, group: ManagerGroup) -> None:
        self.process_group = group
        self.sent_bytes = 0

    @property
    def world_size(self) -> int:
        """The number of replicas that take part in this step."""
        return count_participants(self.process_group.manager)

    def step_after(self, number: int) -> int:
        """The count of committed steps, which all replicas share regardless of how many each has done."""
        return self.process_group.manager.current_step() + 1

    def sum_(self, flat: Tensor) -> None:
        """In place: the sum over the participating replicas, with the same bits on each."""
        if flat.numel() == 0:
            return
        self.process_group.allreduce([flat]).wait()
        size = self.world_size
        self.sent_bytes += 2 * flat.nbytes * (size - 1) // size


class _Done(_torch.Work):
    """A completed operation that did nothing."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _ManagedSum(_torch.Work):
    """A sum in flight. For the reducer it always succeeds: should_commit() decides whether the step counts."""

    def __init__(self, group: ManagerGroup, work: dist.Work, tensor: torch.Tensor) -> None:
        super().__init__()
        self._group, self._work, self._tensor = group, work, tensor
        # torchft asserts that the waiter is on the stream that started the sum; backward may end on another.
        self._stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None

    def wait(self, timeout: Any = None) -> bool:
        # torchft's futures are lazy and get their values here. The time limit is the manager's.
        with self._stream if self._stream is not None else contextlib.nullcontext():
            succeeded = self._work.wait()
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        if not succeeded or self._group.manager.errored() is not None:
            self._group.failed = True
            if self._tensor.numel() == 1 and self._tensor.is_floating_point():
                self._tensor.fill_(float("nan"))  # perhaps of weights: this replica's own 0 must not pass for the sum
        return True
