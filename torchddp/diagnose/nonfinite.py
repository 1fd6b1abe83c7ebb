"""Finds where infinite and NaN gradients come from: the first rank, parameter and step."""

from __future__ import annotations

import logging
import os
import threading
import weakref

from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.errors import NonFinite, listed
from torchddp.transport.store import try_board
from torchddp.transport.worker import Task, watch

logger = logging.getLogger("torchddp.distributed")

LOOK_EVERY_S = 0.5
_LISTED = 8


class NonFiniteFinder(StepObserver):
    """Logs what the reducer has found. Ranks post it on a `Board`, which rank 0 checks twice a second."""

    def __init__(self, session: ReducerSession) -> None:
        self._session = weakref.ref(session)  # checking ends with it
        self._names = [spec.name for spec in session.specs]
        self._rank = session.rank
        self._lock = threading.Lock()
        self._pid = os.getpid()  # a forked child has no watcher, and locks in an unknown state
        self._version = 0
        self._own: list[NonFinite] = []
        self._warned_step = 0
        self._posted: object = None  # the last post that this rank has seen
        self._is_new = False  # the last post, not yet logged
        self._logged: set[tuple[int, int]] = set()  # rank and first step of what rank 0 has logged
        self._board = None if session.is_copy else try_board(session.process_group, "nonfinite", self._cannot_report)
        self._task: Task | None = None
        if self._board is not None:
            self._task = watch(self._look, LOOK_EVERY_S)
            self._board.link.at_end(self.close)

    def close(self) -> None:
        if self._task is not None:
            self._task.close()

    def found(self) -> list[NonFinite]:
        self.before_step()
        return sorted((one for own in self._by_rank() for one in own), key=lambda one: (one.step, one.rank))

    def before_step(self) -> None:
        """Log and post what this rank has found since the last call. Almost free if there is nothing."""
        session = self._session()
        if session is None or (version := session.reducer.nonfinite_version()) == self._version:
            return
        if os.getpid() != self._pid:
            return
        with self._lock:
            if version == self._version:
                return
            self._version = version
            self._own = [
                NonFinite(step, self._rank, self._names[param], count if count >= 0 else None)
                for step, param, count in session.reducer.nonfinite()
            ]
            self._warn()
            self._post()

    def _cannot_report(self, error: RuntimeError) -> None:
        logger.warning("Checks(nonfinite=): rank %d can't report what it finds: %s", self._rank, error)

    def _warn(self) -> None:
        first = self._own[0].step
        if first == self._warned_step:  # the same episode continues: the weights may be NaN by now
            return
        self._warned_step = first
        sources = [one for one in self._own if one.step == first]
        logger.warning(
            "rank %d, step %d: infinite or NaN values in this rank's own gradients, before averaging: %s. Later steps "
            "are not reported until a step has none.",
            self._rank,
            first,
            listed(sources, _LISTED),
        )

    def _post(self) -> None:
        if self._board is None:
            return
        try:
            self._board.post_own("found", [[one.step, one.parameter, one.count] for one in self._own])
            self._board.post("last", [self._rank, self._version])
        except RuntimeError as error:
            self._cannot_report(error)

    def _by_rank(self) -> list[list[NonFinite]]:
        """The findings of all ranks, or of this one alone if the store does not answer."""
        if self._board is None:
            return [self._own]
        try:
            posted = self._board.read_of_ranks("found")
        except RuntimeError:
            return [self._own]
        others = [
            [NonFinite(step, rank, parameter, count) for step, parameter, count in found or ()]
            for rank, found in enumerate(posted)
        ]
        others[self._rank] = self._own
        return others

    # --- on the watcher's thread ---

    def _look(self) -> None:
        if self._session() is None:
            self.close()
            return
        self.before_step()
        if self._rank != 0 or self._board is None:
            return
        try:
            last = self._board.read("last")
        except RuntimeError:  # the store's host is gone, and the job with it
            self.close()
            return
        if last != self._posted:  # others may post about the same step: report all of them together
            self._posted, self._is_new = last, True
        elif self._is_new:
            self._is_new = False
            self._report()

    def _report(self) -> None:
        starts = {(found[0].rank, found[0].step): found for found in self._by_rank() if found}
        new = {start: found for start, found in starts.items() if start not in self._logged}
        self._logged = set(starts)
        if not new:
            return
        first = min(step for _, step in new)
        sources = "; ".join(
            f"rank {rank}: {listed([one for one in found if one.step == step], _LISTED)}"
            for (rank, step), found in sorted(new.items())
            if step == first
        )
        later = [str(rank) for rank, step in sorted(new) if step > first]
        logger.warning(
            "Infinite or NaN gradients began in step %d. %s%s",
            first,
            sources,
            f". In later steps also on rank {', '.join(later)}" if later else "",
        )
