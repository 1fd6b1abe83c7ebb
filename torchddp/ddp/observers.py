"""What looks on at the steps of a model: bucket planning, checks, hang reports, and what a program adds.

To add one, write a class with the methods of `StepObserver` and register it by one line below, or by `register` from
outside of the package. The module and the session know observers by these methods alone.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torchddp.ddp.options import DDPOptions
    from torchddp.ddp.session import ReducerSession

__all__ = ["Observers", "StepObserver", "register"]

logger = logging.getLogger("torchddp.distributed")


class StepObserver(Protocol):
    """Told of a model's steps on the training thread; derive from it, and override what matters.

    An error ends the forward it is raised in. Where a method is collective, every rank's model must have the observer.
    """

    def before_step(self) -> None:
        """At the begin of each forward with gradients. ``session.synchronises``: whether they will be reduced."""

    def after_forward(self, output: Any) -> None:
        """At the end of each forward with gradients. ``output``: what the program gets."""

    def on_no_sync(self, *, begins: bool) -> None:
        """``model.no_sync()`` begins, or has ended."""

    def on_error(self, error: BaseException) -> None:
        """The forward raised this."""

    def on_group_change(self) -> None:
        """The session goes on over another process group, whose ranks may have done other numbers of steps."""

    def close(self) -> None:
        """The model lets go of it: it is released, wrapped anew, or without a process group for now."""


# Called with a model's session once the reducer is there.
Factory = Callable[["ReducerSession"], StepObserver]


@dataclass(frozen=True)
class _Registered:
    factory: Factory | str  # "module:name", imported when a model wants it
    wanted: Callable[[DDPOptions], bool]
    is_optional: bool

    def make(self, session: ReducerSession) -> StepObserver:
        made: StepObserver = (load(self.factory) if isinstance(self.factory, str) else self.factory)(session)
        return made


_registered: dict[str, _Registered] = {}


def register(
    name: str,
    factory: Factory | str,
    wanted: Callable[[DDPOptions], bool] = lambda options: True,
    *,
    is_optional: bool = False,
) -> None:
    """Models made from now on have this observer.

    Args:
        name: for `Observers.get`; registering it again replaces the one before.
        factory: called with the model's session, or where that class or function is: "package.module:name".
        wanted: whether a model with these options gets one.
        is_optional: a process that can't even read its module (no file descriptors are left) goes on without.
    """
    _registered[name] = _Registered(factory, wanted, is_optional)


def unregister(name: str) -> None:
    """Models made from now on are without it. KeyError: there is no such observer."""
    del _registered[name]


# In the order in which they are told of a step.
register("find_nonfinite", "torchddp.diagnose.nonfinite:NonFiniteFinder", lambda o: bool(o.find_nonfinite))
register("check_parameters", "torchddp.diagnose.parameters:ParameterCheck", lambda o: bool(o.check_parameters_every))
register(
    "hang_reports", "torchddp.diagnose.hang_reports:HangReports", lambda o: o.stall_report_s != 0, is_optional=True
)
register("bucket_planning", "torchddp.plan.auto_plan:BucketPlanning", lambda o: o.plans_buckets)
register("traps", "torchddp.diagnose.traps:Traps", is_optional=True)


class Observers:
    """Those of one model."""

    def __init__(self, session: ReducerSession) -> None:
        self._session = session
        self._by_name: dict[str, StepObserver] = {}
        for name, entry in _registered.items():
            try:
                if entry.wanted(session.options):
                    self._by_name[name] = entry.make(session)
            except OSError as error:
                if not entry.is_optional:
                    raise
                logger.debug("no %s on rank %d: %s", name, session.rank, error)
        self._after_forward = self._told_of("after_forward")
        self._on_no_sync = self._told_of("on_no_sync")

    def __iter__(self) -> Iterator[StepObserver]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Any:
        """The one that is registered by this name, or None if the model has none."""
        return self._by_name.get(name)

    def add(self, name: str) -> Any:
        """As `get`, and made now if it is not there."""
        if name not in self._by_name:
            self._by_name[name] = _registered[name].make(self._session)
            self._after_forward = self._told_of("after_forward")
            self._on_no_sync = self._told_of("on_no_sync")
        return self._by_name[name]

    def _told_of(self, event: str) -> list[Callable[..., None]]:
        """The methods of those that want to know of what few do."""
        nothing = getattr(StepObserver, event)
        return [getattr(one, event) for one in self if getattr(type(one), event, nothing) is not nothing]

    def before_step(self) -> None:
        for observer in self._by_name.values():
            observer.before_step()

    def after_forward(self, output: Any) -> None:
        for tell in self._after_forward:
            tell(output)

    def on_no_sync(self, *, begins: bool) -> None:
        for tell in self._on_no_sync:
            tell(begins=begins)

    def on_error(self, error: BaseException) -> None:
        for observer in self:
            observer.on_error(error)

    def on_group_change(self) -> None:
        for observer in self:
            observer.on_group_change()

    def close(self) -> None:
        for observer in self:
            observer.close()


def load(path: str) -> Any:
    """What "package.module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
