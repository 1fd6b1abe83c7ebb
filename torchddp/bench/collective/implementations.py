"""Who runs a collective: torch on a process group, the transports of ours, and, on request, other packages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp.bench.collective.companion import Run, timed_ns
from torchddp.bench.collective.operations import Check, Operation, broadcast_root, stamp

if TYPE_CHECKING:
    from torchddp._C import Transport

GLOO = "gloo"
SHM = "shm"
SHM_BACKEND = "torchddp_shm"
# torchddp's, which are compared with the best peer.
OURS = ("c10d", SHM, SHM_BACKEND)
# Processes beside the ranks have slept while others ran, so that the scheduler lets them finish a call. On a busy
# machine, and where ranks take turns, a rank that never slept loses its processor in the midst of far more of them.
REST_S = 0.002
Made = TypeVar("Made")


class Trial(Protocol):
    """One implementation's collective on one message, its memory included. Both methods are collective."""

    name: str

    def time_ns(self, lead_in: int) -> int:
        """The time on this rank of one call after `lead_in` others, each on an input just written."""

    def check(self) -> None:
        """Run once; `WrongResultError` if the result is another one."""


class Implementation(Protocol):
    """One line of the table."""

    name: str
    # What a reader of its times should know; may be empty.
    remark: str

    def trial(self, operation: Operation, numel: int) -> Trial:
        """Ready to run on a message of `numel` elements of fp32; collective. Raises if it is not available."""

    def close(self) -> None:
        """End what runs beside this process."""


class Library(Protocol):
    """What runs in the process of the rank, on memory that the rank can write."""

    name: str
    remark: str

    def allocate(self, numel: int) -> Tensor:
        """The memory this library likes best, flat fp32."""

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Run:
        """A function that runs the collective once and returns when its result may be used."""


# --- in the process of the rank --------------------------------------------------------------------------------------


@dataclass
class LocalTrial:
    """A call on source and target, which may be the same memory."""

    name: str
    source: Tensor
    target: Tensor
    run: Run
    checked: Check
    meet: Run

    def __post_init__(self) -> None:
        # Through numpy: copying small tensors takes torch longer than an all-reduce.
        self._array = self.source.numpy()
        self._input = stamp(self.checked.rank, self.source.numel()).numpy()

    def time_ns(self, lead_in: int) -> int:
        time.sleep(REST_S)
        return timed_ns(self._rewrite, self.run, self.meet, lead_in)

    def check(self) -> None:
        self.target.fill_(-1)
        self._rewrite()
        self.run()
        self.checked.compare(self.target)

    def _rewrite(self) -> None:
        self._array[:] = self._input


class Local:
    """A library in the process of the rank, as an implementation."""

    def __init__(self, library: Library, meet: Run) -> None:
        self.name = library.name
        self.remark = library.remark
        self._library = library
        self._meet = meet

    def trial(self, operation: Operation, numel: int) -> Trial:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        source = target = self._library.allocate(numel)
        if operation.sharded:
            part = self._library.allocate(numel // world_size)
            source, target = (part, target) if operation.name == "all_gather" else (source, part)
        run = self._library.bind(operation.name, source, target)
        check = Check(self.name, operation.name, rank, world_size, numel)
        return LocalTrial(self.name, source, target, run, check, self._meet)

    def close(self) -> None:
        """Nothing does."""


def _torch_collective(name: str, old_name: str) -> Callable[..., Any]:
    # torch 2.13 renamed two collectives; the old names still work, and warn in every call.
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, old_name)
    return found


class Functions:
    """torch.distributed's functions on a process group of one backend, as a user calls them."""

    remark = ""

    def __init__(self, backend: str) -> None:
        self.name = backend
        self._group = dist.group.WORLD if dist.get_backend() == backend else dist.new_group(backend=backend)

    def allocate(self, numel: int) -> Tensor:
        return torch.empty(numel)

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Run:
        group = self._group
        root = broadcast_root(dist.get_world_size())
        all_gather = _torch_collective("all_gather_single", "all_gather_into_tensor")
        reduce_scatter = _torch_collective("reduce_scatter_single", "reduce_scatter_tensor")
        calls: dict[str, Run] = {
            "all_reduce": lambda: dist.all_reduce(target, group=group),
            "broadcast": lambda: dist.broadcast(target, src=root, group=group),
            "all_gather": lambda: all_gather(target, source, group=group),
            "reduce_scatter": lambda: reduce_scatter(target, source, group=group),
        }
        return calls[operation]


def open_transport(choice: str, group: Any) -> Transport:
    from torchddp.transport import select

    return select.open_transport(choice, group)


class Ours:
    """A transport of torchddp, on memory that it allocated: where gradient buckets lie."""

    remark = ""

    def __init__(self, choice: str) -> None:
        self.name = choice
        self._transport = open_transport(choice, dist.group.WORLD)

    def allocate(self, numel: int) -> Tensor:
        return self._transport.allocate(numel, torch.empty(0))

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Run:
        transport, work = self._transport, self._transport.make_work()
        root = broadcast_root(transport.size)
        # Without a frame of Python in between: the reducer calls it from C++.
        calls: dict[str, Run] = {
            "all_reduce": partial(transport.all_reduce, target, work, True),
            "broadcast": partial(transport.broadcast, target, root, work, True),
            "all_gather": partial(transport.all_gather, target, source, work, True),
            "reduce_scatter": partial(transport.reduce_scatter, target, source, work, True),
        }
        return calls[operation]


# --- all of them -----------------------------------------------------------------------------------------------------


def attempt(make: Callable[[], Made]) -> tuple[Made | None, str | None]:
    """What `make` returns, or None and a reason on every rank if it raises on any of them."""
    made, reason = None, None
    try:
        made = make()
    except Exception as error:  # an extension that does not load, a transport that refuses, memory that is not there
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    agreed = next((found for found in reasons if found is not None), None)
    return (made, None) if agreed is None else (None, agreed)


# The name of a line, and how it is opened on every rank of this host, which meet in the function.
Opening = tuple[str, Callable[[Run], Implementation]]


def _local(name: str, make: Callable[[str], Library]) -> Opening:
    return name, lambda meet: Local(make(name), meet)


OPENINGS: tuple[Opening, ...] = (
    _local(GLOO, Functions),
    _local("c10d", Ours),
    _local(SHM, Ours),
    _local(SHM_BACKEND, Functions),
)


def open_all(openings: Sequence[Opening], meet: Run) -> tuple[list[Implementation], dict[str, str]]:
    """Every implementation that opens on all ranks, and the reasons of the others."""
    opened: list[Implementation] = []
    reasons: dict[str, str] = {}
    for name, make in openings:
        one, reason = attempt(lambda make=make: make(meet))  # type: ignore[misc]
        if one is not None:
            opened.append(one)
        else:
            reasons[name] = str(reason)
    return opened, reasons
