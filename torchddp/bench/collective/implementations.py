"""What runs a collective: torch's gloo, or a transport of ours. Those that cannot be opened say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp.bench.collective.names import GLOO, OURS

if TYPE_CHECKING:
    from torchddp._C import Transport

Made = TypeVar("Made")


def open_transport(choice: str, group: Any) -> Transport:
    """A transport of ours over a process group. Raises where there is none of that name."""
    from torchddp.transport import select

    return select.open_transport(choice, group)


class Implementation(Protocol):
    """One line of the table."""

    @property
    def name(self) -> str: ...

    def allocate(self, numel: int) -> Tensor:
        """The memory this implementation likes best, flat fp32."""

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Callable[[], object]:
        """A function that runs the collective once and returns when its result may be used."""


def broadcast_root(world_size: int) -> int:
    """Not rank 0, which holds the clock: what it times is the arrival of the data."""
    return world_size - 1


def _torch_collective(name: str, old_name: str) -> Callable[..., Any]:
    # torch 2.13 renamed two collectives; the old names still work, and warn in every call.
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, old_name)
    return found


class Gloo:
    """torch.distributed's functions on the process group, as a user calls them."""

    name = GLOO

    def allocate(self, numel: int) -> Tensor:
        return torch.empty(numel)

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Callable[[], object]:
        root = broadcast_root(dist.get_world_size())
        all_gather = _torch_collective("all_gather_single", "all_gather_into_tensor")
        reduce_scatter = _torch_collective("reduce_scatter_single", "reduce_scatter_tensor")
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(target),
            "broadcast": lambda: dist.broadcast(target, src=root),
            "all_gather": lambda: all_gather(target, source),
            "reduce_scatter": lambda: reduce_scatter(target, source),
        }
        return calls[operation]


class Ours:
    """A transport of torchddp, on memory that it allocated: where gradient buckets lie."""

    def __init__(self, choice: str) -> None:
        self.name = choice
        self._transport = open_transport(choice, dist.group.WORLD)

    def allocate(self, numel: int) -> Tensor:
        return self._transport.allocate(numel, torch.empty(0))

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Callable[[], object]:
        transport, work = self._transport, self._transport.make_work()
        root = broadcast_root(transport.size)
        starts: dict[str, Callable[[], None]] = {
            "all_reduce": lambda: transport.all_reduce(target, work),
            "broadcast": lambda: transport.broadcast(target, root, work),
            "all_gather": lambda: transport.all_gather(target, source, work),
            "reduce_scatter": lambda: transport.reduce_scatter(target, source, work),
        }
        start = starts[operation]

        def run() -> None:
            start()
            work.wait()

        return run


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


def open_all() -> tuple[list[Implementation], dict[str, str]]:
    """Every implementation that opens on all ranks, and the reasons of the others."""
    opened: list[Implementation] = [Gloo()]
    reasons: dict[str, str] = {}
    for choice in OURS:
        ours, reason = attempt(lambda choice=choice: Ours(choice))  # type: ignore[misc]
        if ours is not None:
            opened.append(ours)
        else:
            reasons[choice] = str(reason)
    return opened, reasons
