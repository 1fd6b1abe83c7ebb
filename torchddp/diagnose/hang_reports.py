"""Lets the hang monitor watch a model. See docs/hang_reports.md."""

from __future__ import annotations

import threading

from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose import rank_state
from torchddp.diagnose.monitor import HangMonitor, ModelWaits, monitor_of
from torchddp.transport.store import home_of


class HangReports(StepObserver):
    """Reports a model's waits over its process group.

    Not collective, but all ranks must create the same number in the same order. There are no reports for a copy of a
    model, a group of one rank, and a group without a store for the ranks to communicate through.
    """

    def __init__(self, session: ReducerSession) -> None:
        self.monitor: HangMonitor | None = None
        self.waits: ModelWaits | None = None
        self.before_step()  # until the first step, the thread that wraps the model
        group = session.process_group
        if session.is_copy or session.stall_limit_s == 0 or group.size() == 1:
            return
        self.monitor = monitor_of(home_of(group))
        if self.monitor is not None:
            self.waits = ModelWaits(session, session.stall_limit_s)
            self.monitor.add(self.waits)

    def before_step(self) -> None:
        """Record this thread as the training thread, whose stack and exceptions a report shows."""
        rank_state.training.thread = threading.get_ident()

    def on_error(self, error: BaseException) -> None:
        rank_state.note_exception(error, "forward")

    def close(self) -> None:
        if self.monitor is not None and self.waits is not None:
            self.monitor.remove(self.waits)
        self.monitor = self.waits = None
