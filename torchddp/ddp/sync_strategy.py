"""When the gradients of accumulated microbatches are reduced."""

from __future__ import annotations

from enum import Enum


class DDPSyncStrategy(str, Enum):
    """How and when the gradients of a step of several microbatches are reduced (the names are Composer's).

    Strings name members in any case: ``DDPSyncStrategy("forced_sync")``; ValueError for unknown ones.

    * ``SINGLE_AUTO_SYNC``: while the last microbatch's backward runs. One reduction a step, which backward hides.
    * ``MULTI_AUTO_SYNC``: while each microbatch's backward runs. As many reductions as microbatches.
    * ``FORCED_SYNC``: all at once, after the last microbatch's backward. One reduction a step, which nothing hides, for
      any use of parameters.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"

    @classmethod
    def _missing_(cls, value: object) -> DDPSyncStrategy:
        if isinstance(value, str) and value.lower() in {member.value for member in cls}:
            return cls(value.lower())
        allowed = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"unknown sync strategy {value!r}: it must be a DDPSyncStrategy, or one of {allowed}")


def choose(asked_for: DDPSyncStrategy | str | None, find_unused_parameters: bool) -> DDPSyncStrategy:
    """The strategy of a model; ``None``: as Composer's trainer chooses."""
    if asked_for is not None:
        return DDPSyncStrategy(asked_for)
    return DDPSyncStrategy.MULTI_AUTO_SYNC if find_unused_parameters else DDPSyncStrategy.SINGLE_AUTO_SYNC
