"""Observers of a model's steps: bucket planning, checks, hang reports, and whatever a program adds.

To add one, write a class with the methods of `StepObserver` and register it with one line in `torchddp/_assembly.py`,
or from outside the package with `register`.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torchddp.ddp.options import DDPOptions
from torchddp.ddp.session import ReducerSession

logger = logging.getLogger("torchddp.distributed")


class StepObserver(Protocol):
    """Notified of a model's steps on the training thread. Derive from it and override what you need.

    An exception ends the forward in which it is raised. A collective method must be there on every rank.
    """

    def before_step(self) -> None:
        """At the start of each forward with gradients. ``session.synchronizes``: whether they will be reduced."""

    def after_forward(self, output: object) -> None:
        """At the end of each forward with gradients. ``output``: what the program receives."""

    def on_error(self, error: BaseException) -> None:
        """The forward raised this error."""

    def close(self) -> None:
        """The model drops the observer because it is destroyed, rewrapped, or leaves its process group.

        Over another group it gets new ones. Its ranks may have done different numbers of steps.
        """


# Called with a model's session once the reducer exists.
Factory = Callable[[ReducerSession], StepObserver]


@dataclass(frozen=True)
class _Registered:
    factory: Factory | str  # "module:name", imported when a model needs it
    wanted: Callable[[DDPOptions], bool]
    is_optional: bool

    def make(self, session: ReducerSession) -> StepObserver:
        factory = pkgutil.resolve_name(self.factory) if isinstance(self.factory, str) else self.factory
        made: StepObserver = factory(session)
        return made


_registered: dict[str, _Registered] = {}


def register(
    name: str,
    factory: Factory | str,
    wanted: Callable[[DDPOptions], bool] = lambda options: True,
    *,
    is_optional: bool = False,
) -> None:
    """Give this observer to models constructed from now on.

    Args:
        name: for `Observers.get`; registering it again replaces the previous one.
        factory: called with the model's session, or the location of such a class or function: "package.module:name".
        wanted: whether a model with these options gets one.
        is_optional: continue without it if creating it raises OSError, for example for lack of file descriptors.
    """
    _registered[name] = _Registered(factory, wanted, is_optional)


def unregister(name: str) -> None:
    """Stop giving this observer to new models. KeyError if there is none of that name."""
    del _registered[name]


class Observers:
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
        self._after_forward = self._after_forwards()

    def __iter__(self) -> Iterator[StepObserver]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Any:
        return self._by_name.get(name)

    def add(self, name: str) -> Any:
        if name not in self._by_name:
            self._by_name[name] = _registered[name].make(self._session)
            self._after_forward = self._after_forwards()
        return self._by_name[name]

    def _after_forwards(self) -> list[Callable[[object], None]]:
        """Bound methods of the observers that override this one."""
        default = StepObserver.after_forward
        return [o.after_forward for o in self if getattr(type(o), "after_forward", default) is not default]

    def before_step(self) -> None:
        for observer in self._by_name.values():
            observer.before_step()

    def after_forward(self, output: object) -> None:
        for notify in self._after_forward:
            notify(output)

    def on_error(self, error: BaseException) -> None:
        for observer in self:
            observer.on_error(error)

    def close(self) -> None:
        for observer in self:
            observer.close()
