"""What waits for the ranks of a process group in this process, and can be told to wait no longer."""

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
    """A model, or what averages one."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Whose ranks it talks to; None: to nobody any more."""

    def interrupt(self, reason: str) -> None:
        """From any thread, without waiting: waits under way, and all later ones, raise TransportError(reason)."""


_members: weakref.WeakSet[Interruptible] = weakref.WeakSet()
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it in the parent


os.register_at_fork(after_in_child=_new_lock)


def register(member: Interruptible) -> None:
    """Known from now on, until it is gone."""
    with _lock:
        _members.add(member)


def members_of(process_group: dist.ProcessGroup) -> list[Interruptible]:
    """Those that talk to ranks of this group alone: over it, or over a group of some of its ranks."""
    with _lock:
        members = list(_members)
    return [member for member in members if _is_within(member.process_group, process_group)]


def interrupt_all(process_group: dist.ProcessGroup, reason: str) -> None:
    """Interrupts `members_of` the group; an error of one keeps no other from it."""
    for member in members_of(process_group):
        try:
            member.interrupt(reason)
        except Exception:
            logger.exception("could not interrupt a %s", type(member).__name__)


def _is_within(inner: dist.ProcessGroup | None, outer: dist.ProcessGroup) -> bool:
    if inner is outer:
        return True
    if inner is None or inner not in _world.pg_map or outer not in _world.pg_map:
        return False  # torch does not know its ranks
    return set(dist.get_process_group_ranks(inner)) <= set(dist.get_process_group_ranks(outer))
