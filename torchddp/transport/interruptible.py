"""Registry of objects in this process that wait for ranks of a process group and can be interrupted."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

logger = logging.getLogger(__name__)


class Interruptible(Protocol):
    """A model, or something that averages one."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group whose ranks it communicates with; None: no longer any."""

    def interrupt(self, reason: str) -> None:
        """Thread-safe, does not wait: current and later waits raise TransportError(reason)."""


_members: weakref.WeakSet[Interruptible] = weakref.WeakSet()
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_new_lock)


def register(member: Interruptible) -> None:
    """Include it from now on, until it is destroyed."""
    with _lock:
        _members.add(member)


def members_of(process_group: dist.ProcessGroup) -> list[Interruptible]:
    """The registered objects that communicate only with ranks of this group, over it or over a subgroup."""
    with _lock:
        members = list(_members)
    return [member for member in members if _is_within(member.process_group, process_group)]


def interrupt_all(process_group: dist.ProcessGroup, reason: str) -> None:
    """Interrupt all `members_of` the group; an error in one does not spare the others."""
    for member in members_of(process_group):
        try:
            member.interrupt(reason)
        except Exception:
            logger.exception("could not interrupt a %s", type(member).__name__)


def _is_within(inner: dist.ProcessGroup | None, outer: dist.ProcessGroup) -> bool:
    if inner is outer:
        return True
    if inner is None or inner not in _world.pg_map or outer not in _world.pg_map:
        return False  # torch doesn't know its ranks
    return set(dist.get_process_group_ranks(inner)) <= set(dist.get_process_group_ranks(outer))
