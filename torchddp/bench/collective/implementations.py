"""The implementations of a collective: torch on a process group, and torchddp's transports."""

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
# torchddp's implementations, which are compared with the best other one.
OURS = ("c10d", SHM, SHM_BACKEND)
# Companions sleep while other implementations run, so the scheduler favors them. A rank that never sleeps is preempted
# during far more calls, if the machine is busy or has fewer cores than ranks.
REST_S = 0.002
Made = TypeVar("Made")


class Trial(Protocol):
    """One implementation's collective on one message, with its memory. Both methods are collective."""

    name: str

    def time_ns(self, lead_in: int) -> int:
        """The time of one call on this rank, after `lead_in` untimed ones, each on a freshly written input."""

    def check(self) -> None:
        """Run once; raise `WrongResultError` if the result is wrong."""


class Implementation(Protocol):
    """One row of the table."""

    name: str
    # A note for readers of its times; may be empty.
    remark: str

    def trial(self, operation: Operation, numel: int) -> Trial:
        """Collective: prepare a message of `numel` fp32 elements. Raises if the implementation can't run it."""

    def close(self) -> None:
        """End its companion processes, if any."""


class Library(Protocol):
    """An implementation that runs in the rank's own process, on memory that the rank can write."""

    name: str
    remark: str

    def allocate(self, numel: int) -> Tensor:
        """Allocate a flat fp32 tensor in the kind of memory that suits this library best."""

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Run:
        """Return a function that runs the collective once and returns when its result can be used."""


# --- in the rank's own process ---------------------------------------------------------------------------------------


@dataclass
class LocalTrial:
    """A call from source to target, which may be the same tensor."""

    name: str
    source: Tensor
    target: Tensor
    run: Run
    checked: Check
    meet: Run

    def __post_init__(self) -> None:
        # numpy, because torch takes longer to copy a small tensor than an all-reduce takes.
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
    """Makes an implementation of a library in the rank's own process."""

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
        """It has no companion."""


def _torch_collective(name: str, old_name: str) -> Callable[..., Any]:
    # torch 2.13 renamed two collectives. The old names still work but warn in every call.
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, old_name)
    return found


class Functions:
    """torch.distributed's functions, as users call them, on a process group with the given backend."""

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
    """A transport of torchddp, on memory that it allocated, as for gradient buckets."""

    remark = ""

    def __init__(self, choice: str) -> None:
        self.name = choice
        self._transport = open_transport(choice, dist.group.WORLD)

    def allocate(self, numel: int) -> Tensor:
        return self._transport.allocate(numel, torch.empty(0))

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Run:
        transport, work = self._transport, self._transport.make_work()
        root = broadcast_root(transport.size)
        # partial adds no Python frame; the reducer calls these from C++.
        calls: dict[str, Run] = {
            "all_reduce": partial(transport.all_reduce, target, work, True),
            "broadcast": partial(transport.broadcast, target, root, work, True),
            "all_gather": partial(transport.all_gather, target, source, work, True),
            "reduce_scatter": partial(transport.reduce_scatter, target, source, work, True),
        }
        return calls[operation]


# --- all of them -----------------------------------------------------------------------------------------------------


def attempt(make: Callable[[], Made]) -> tuple[Made | None, str | None]:
    """Collective: `make()` and None; if it raises on any rank, None and the reason on every rank."""
    made, reason = None, None
    try:
        made = make()
    except Exception as error:  # such as a library that fails to load, a transport that can't be used, or no memory
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    agreed = next((found for found in reasons if found is not None), None)
    return (made, None) if agreed is None else (None, agreed)


# The name of a row, and a function that opens it on every rank; it receives the barrier that starts timed calls.
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
    """Collective: the implementations that open on all ranks, and by name why the others don't."""
    opened: list[Implementation] = []
    reasons: dict[str, str] = {}
    for name, make in openings:
        one, reason = attempt(lambda make=make: make(meet))  # type: ignore[misc]
        if one is not None:
            opened.append(one)
        else:
            reasons[name] = str(reason)
    return opened, reasons
