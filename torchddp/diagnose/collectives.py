"""``torchddp.watch_collectives()``: hang reports for all collectives of a program. See docs/hang_reports.md."""

from __future__ import annotations

import logging
import math
import os
import threading
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from torchddp.ddp.options import check_stall_report, stall_limit_s
from torchddp.diagnose import watched
from torchddp.diagnose.calls import CallWaits
from torchddp.diagnose.monitor import HangMonitor, Wait, monitor_of
from torchddp.diagnose.rank_state import RankState
from torchddp.transport.agreement import message_device
from torchddp.transport.select import group_timeout

logger = logging.getLogger("torchddp.hang")

_lock = threading.RLock()
# One entry, with its limit, per active call of watch_collectives(); watching ends with the last one.
_watchers: dict[object, float | None] = {}
_seams = ExitStack()
_sources: list[tuple[HangMonitor, CallSource]] = []


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    _sources.clear()


os.register_at_fork(after_in_child=_after_fork)


def watch_collectives(*, stall_report_s: float | None = None) -> ExitStack:
    """Report why a torch.distributed call hangs, with or without a wrapped model.

    Example:

        with torchddp.watch_collectives(stall_report_s=30):
            dist.all_reduce(torch.ones(1))  # if this hangs for 30 s, one rank logs which rank is missing, and where

    Watches the collectives, sends and receives of torch.distributed, however the program obtained the functions. It
    records each call's function, calling line, sequence number in the process group, and the shape and dtype of its
    first tensor; no tensor is kept alive. When a call has not returned after ``stall_report_s``, the ranks exchange
    what they are doing through the store of the default process group, and one of them logs the report.
    ``torchddp.install()`` calls this.

    Not collective, but every rank should call it: about a rank without it, reports can only say that it does not
    answer. Calls may nest; watching ends with the last of them. Forked children inherit it.

    Nothing is watched if TORCH_DISTRIBUTED_DEBUG is DETAIL, because torch then compares all collectives itself, or if
    reports are turned off. Nothing is reported in a job of one rank, or without a store.

    Args:
        stall_report_s: how many seconds a call may take; 0: watch nothing. None: the environment variable
            TORCHDDP_STALL_REPORT_S, or else the smaller of 60 and a third of the default process group's timeout.

    Returns:
        A context manager that ends the watching, as does its ``close()``; without either, watching lasts as long as the
        process.

    Raises:
        TypeError, ValueError: the limit, or the variable's value, is not a finite number of at least 0.
    """
    check_stall_report(stall_report_s)
    stack = ExitStack()
    if stall_limit_s(stall_report_s, math.inf) == 0 or dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return stack
    watcher = object()
    with _lock:
        if not _watchers:
            _seams.enter_context(watched.watch_all())
            _seams.enter_context(watched.after_each_call(dist.init_process_group, _look_after_default_group))
        _watchers[watcher] = stall_report_s
        _look_after_default_group()
    stack.callback(_end, watcher)
    return stack


def _end(watcher: object) -> None:
    with _lock:
        _watchers.pop(watcher, None)
        if not _watchers:
            _seams.close()
            while _sources:
                monitor, source = _sources.pop()
                monitor.remove(source)


def _look_after_default_group() -> None:
    """Watch the default group, if it exists. Errors here must not reach the program."""
    try:
        home = dist.group.WORLD
        with _lock:
            _sources[:] = [(monitor, source) for monitor, source in _sources if not monitor.closed]
            if home is None or any(source.is_of(home) for _, source in _sources):
                return
            monitor = monitor_of(home)
            if monitor is not None:
                source = CallSource(home, _limit_s(home))
                monitor.add(source)
                _sources.append((monitor, source))
    except Exception:
        logger.debug("collectives are not watched", exc_info=True)


def _limit_s(home: dist.ProcessGroup) -> float:
    """The latest setting wins. A limit beyond the timeout never takes effect, because the call fails first."""
    asked_for_s = list(_watchers.values())[-1]
    timeout_s = group_timeout(home, message_device(home).type).total_seconds()
    try:
        return stall_limit_s(asked_for_s, timeout_s)
    except ValueError:
        return stall_limit_s(asked_for_s, math.inf)


class CallSource:
    """The calls over a job's groups, for its monitor.

    Args:
        home: the job's default group.
        stall_s: seconds after which the other ranks are asked.
    """

    is_gone = False

    def __init__(self, home: dist.ProcessGroup, stall_s: float) -> None:
        self.stall_s = stall_s
        self._calls = CallWaits(home)

    def is_of(self, home: dist.ProcessGroup) -> bool:
        return self._calls.is_of(home)

    def waits(self) -> list[Wait]:
        return [Wait(underway, underway.waited_s, self.stall_s) for underway in self._calls.look()]

    def describe(self, state: RankState, asked: str) -> None:
        state.calls, state.groups = self._calls.states(), self._calls.groups()

    def meet(self, known: dict[int, dict[str, Any]]) -> None:
        """Nothing, because torch's errors can't be extended."""

    def fail_with(self, found: str) -> None:
        """Nothing, for the same reason."""
