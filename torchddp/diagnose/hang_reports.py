"""Hang reports: looks after a model's waits, asks the ranks when one is too long, answers, and has one of them report.

See docs/hang_reports.md.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.distributed_c10d import _world

from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose import rank_state
from torchddp.diagnose.diagnosis import diagnose, report_json, report_text, write_report
from torchddp.diagnose.rank_state import GONE, STOPPED, RankState
from torchddp.transport.board import Board
from torchddp.transport.worker import Task, watch

logger = logging.getLogger("torchddp.hang")

_AGAIN = 4.0  # a stall that lasts is reported again when it is so many times as long
_MAX_POLL_S = 1.0
_RANKS_A_POLL_S = 64  # worlds that are larger poll more seldom, so that the store has as much to do
_QUICK_S = 0.05  # between looks, while ranks are being asked
_KNOWN_A_LOOK = 8  # ranks whose processes are asked for
_MEETINGS = 100  # looks after which a rank that has not said which process it is never will
_GIVE_UP_ROUNDS = 10  # collection times after which nobody waits for a report any more


class HangReports(StepObserver):
    """Reports of a model's waits over its process group as it is now.

    Not collective, but all ranks must make as many, in the same order. A copy of a model, a group of one rank and a
    group without a store, over which ranks could talk, have none.
    """

    def __init__(self, session: ReducerSession) -> None:
        self._session = session
        self.monitor = self._open()

    def before_step(self) -> None:
        """Notes whose stack and exceptions a report tells of: those of the thread that trains."""
        if self.monitor is not None:
            self.monitor.thread_id = threading.get_ident()

    def on_error(self, error: BaseException) -> None:
        rank_state.note_exception(error, "forward")

    def on_group_change(self) -> None:
        self.close()
        self.monitor = self._open()

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None

    def _open(self) -> HangMonitor | None:
        session, group = self._session, self._session.process_group
        if session.is_copy or session.stall_limit_s == 0 or group.size() == 1:
            return None
        try:
            board = Board(group, "hang")
        except RuntimeError as error:
            logger.debug("no hang reports: %s", error)
            return None
        return HangMonitor(board, session, session.stall_limit_s)


@dataclass(frozen=True)
class _Round:
    """One question to all ranks."""

    number: int
    digest: str
    waited_s: float
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begun_s


class HangMonitor:
    """A model's task on the watcher. Nothing here is collective, raises into training, or keeps the model.

    A forked child is no rank: there its copy neither looks nor tells anything.

    Keys on the board: ``who/R`` (a rank's process), ``left/R`` (why it takes part no more), ``request`` (the last
    question), ``answer/N/R`` (a `RankState`) and ``report/N`` (the finding) of question N.

    Args:
        board: over the model's process group.
        stall_s: seconds of waiting after which ranks are asked.
    """

    def __init__(self, board: Board, session: ReducerSession, stall_s: float) -> None:
        self._board, self._stall_s = board, stall_s
        self._session: ReducerSession = weakref.proxy(session)
        self._group = session.process_group
        self._is_registered = self._group in _world.pg_map
        self.thread_id = threading.get_ident()
        self._poll_s = min(_MAX_POLL_S, stall_s / 4) * max(1.0, board.size / _RANKS_A_POLL_S)
        self._collect_s = 2 * self._poll_s + 0.2
        self._report_at_s = stall_s
        self._round: _Round | None = None
        self._last_number = 0
        self._known: dict[int, dict[str, Any]] = {}
        self._knows_all, self._meetings = False, 0
        self._pid = os.getpid()  # a forked child has no watcher, and locks as they happened to be
        rank_state.note_uncaught()
        # Not later than the watcher's own end, which is registered before.
        self._at_exit = lambda: self.close("" if self._is_over else "its program has ended")
        atexit.register(self._at_exit)
        with contextlib.suppress(Exception):  # a report will say less of this rank
            board.post_own("who", rank_state.process_identity())
        self._task: Task = watch(self._look, min(_QUICK_S, self._poll_s))

    @property
    def _is_over(self) -> bool:
        """Its process group has been destroyed."""
        return self._is_registered and self._group not in _world.pg_map

    def _status(self) -> dict[str, Any] | None:
        """The reducer's, or None if the model is gone."""
        with contextlib.suppress(ReferenceError):
            return self._session.reducer.status()
        return None

    def close(self, why: str = "") -> None:
        """Ends the task; ``why`` is told to the other ranks, if their store still answers."""
        atexit.unregister(self._at_exit)
        if self._task.closed or os.getpid() != self._pid:
            return
        self._task.close()
        if why:
            told = rank_state.last_exception(self.thread_id)
            after = f" after {told['type']}: {told['message']}" if told and told["where"] == "the program" else ""
            with contextlib.suppress(Exception):
                self._board.post_own("left", why + after)

    # --- the task ---

    def _look(self) -> None:
        try:
            self._look_once()
        except Exception:
            # Of the monitor's own: training goes on without it.
            logger.debug("rank %d: a look at the model's waits failed", self._board.rank, exc_info=True)
        busy = self._round is not None or not self._knows_all
        self._task.every_s = min(_QUICK_S, self._poll_s) if busy else self._poll_s

    def _look_once(self) -> None:
        if self._is_over:
            self.close("its process group was destroyed")
            return
        status = self._status()
        if status is None:
            self.close("its model was deleted")
            return
        if status["phase"] != "waiting" or status["waited_s"] < self._stall_s:
            self._report_at_s = self._stall_s
        stalls = status["phase"] == "waiting" and status["waited_s"] >= self._report_at_s
        try:
            self._talk(status, stalls)
        except Exception as error:
            if stalls:
                self._report_alone(status, error)
            else:
                raise

    def _talk(self, status: dict[str, Any], stalls: bool) -> None:
        if not self._knows_all:
            self._get_to_know()
        request = self._board.read("request")
        number = request["number"] if request else 0
        if number > self._last_number:
            self._join_round(_Round(number, request["digest"], request["waited_s"]), status)
        elif stalls and self._round is None:
            number = self._last_number + 1
            digest, waited_s = self._describe()[0], status["waited_s"]
            self._board.post("request", {"number": number, "digest": digest, "waited_s": waited_s})
            self._join_round(_Round(number, "", waited_s), status)
        if self._round is not None:
            self._go_on(self._round)

    def _get_to_know(self) -> None:
        """A few ranks' processes a look: who is gone is seen by them, also when the store answers no more."""
        unknown = [rank for rank in range(min(self._board.size, _RANKS_A_POLL_S)) if rank not in self._known]
        found = {rank: who for rank in unknown[:_KNOWN_A_LOOK] if (who := self._board.read(f"who/{rank}"))}
        if found:
            self._known |= found
            # Errors of the model's transport tell which of these are gone.
            here = [(rank, who) for rank, who in self._known.items() if rank_state.is_here(who)]
            peers = [(rank, who["pid"], who["started"]) for rank, who in here if rank != self._board.rank]
            self._session.reducer.set_peers(peers)
        self._meetings += 1
        self._knows_all = len(found) == len(unknown) or self._meetings > _MEETINGS

    # --- a question to all ranks ---

    def _join_round(self, joined: _Round, status: dict[str, Any]) -> None:
        self._round, self._last_number = joined, joined.number
        if status["phase"] == "waiting":
            self._report_at_s = _AGAIN * max(status["waited_s"], joined.waited_s, self._stall_s)
        state = self._own_state(status)
        if state.digest == joined.digest and self._board.rank > 0:
            state.parameters = None  # as rank 0's, or of whoever has asked
        self._board.post(f"answer/{joined.number}/{self._board.rank}", state.to_json())

    def _own_state(self, status: dict[str, Any]) -> RankState:
        state = RankState.from_status(self._board.rank, status)
        state.who = rank_state.process_identity()
        state.exception = rank_state.last_exception(self.thread_id)
        state.stack = rank_state.stack_of(self.thread_id)
        state.digest, state.parameters = self._describe()
        return state

    def _describe(self) -> tuple[str, list[str]]:
        """Of each parameter that is reduced its name, dtype and shape; a digest of these comes first."""
        session = self._session
        lines = [
            f"'{spec.name}' {str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
            for spec, parameter in zip(session.specs, session.parameters, strict=True)
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest(), lines

    def _go_on(self, asked: _Round) -> None:
        found = self._board.read(f"report/{asked.number}")
        if found is not None:
            self._round = None
            if found:
                self._session.reducer.note_failure(found)
            return
        if asked.age_s > _GIVE_UP_ROUNDS * self._collect_s:
            self._round = None
            return
        states = self._answers(asked) if self._may_report(asked) else None
        if states is not None and self._board.claim(f"report/{asked.number}"):
            self._board.post(f"report/{asked.number}", self._report(states))

    def _may_report(self, asked: _Round) -> bool:
        """Rank 0 first; the others where it has not answered, or has had time enough."""
        if self._board.rank == 0:
            return True
        if asked.age_s < 1.5 * self._collect_s:
            return False
        return asked.age_s > 4 * self._collect_s or self._board.read(f"answer/{asked.number}/0") is None

    def _answers(self, asked: _Round) -> list[RankState] | None:
        """By rank; None if it is too early, or another rank's turn."""
        told = self._board.read_of_ranks(f"answer/{asked.number}")
        if None in told and asked.age_s < self._collect_s:
            return None
        answering = [rank for rank, values in enumerate(told) if values is not None]
        # Of those that answer, a lower rank has its turn earlier.
        turn = answering.index(self._board.rank) if self._board.rank in answering else len(answering)
        if self._board.rank > 0 and asked.age_s < (1.5 + turn) * self._collect_s:
            return None
        return [
            self._silent_state(rank) if values is None else RankState.from_json(values)
            for rank, values in enumerate(told)
        ]

    def _silent_state(self, rank: int) -> RankState:
        who = self._known.get(rank) or self._board.read(f"who/{rank}")
        left = self._board.read(f"left/{rank}") or ""
        return RankState(rank, who=who, left=left, alive=rank_state.look_up(who) or "")

    # --- reports ---

    def _report(self, states: list[RankState]) -> str:
        """Prints the finding; what errors are to tell of it."""
        if self._has_moved(states[self._board.rank]):
            return ""  # the stall has ended while ranks were asked: what they said does not fit together
        if max((state.waited_s for state in states if state.waits), default=0.0) < self._stall_s:
            return ""
        finding = diagnose(states)
        seen: set[str] = set()  # each list of parameters stands in the file once
        for state in states:
            if state.digest in seen:
                state.parameters = None
            seen.add(state.digest)
        path = write_report(report_json(finding, states, self._board.rank))
        logger.error("%s", report_text(finding, states, path))
        return f"Hang report: {finding.headline}"

    def _has_moved(self, told: RankState) -> bool:
        """Whether this rank's training went on since it said so."""
        now = self._status()
        if now is None or now["step"] != told.step:
            return True
        then = (told.phase, told.waits_for, told.bucket)
        return told.waits and (now["phase"], now["waits_for"], now["bucket"]) != then

    def _report_alone(self, status: dict[str, Any], error: Exception) -> None:
        """The store does not answer: what this rank knows by itself."""
        self._report_at_s = _AGAIN * max(status["waited_s"], self._stall_s)
        self._round = None
        others = [
            RankState(rank, who=who, alive=rank_state.look_up(who) or "")
            for rank, who in self._known.items()
            if rank != self._board.rank
        ]
        states = [self._own_state(status), *(state for state in others if state.alive in (GONE, STOPPED))]
        finding = diagnose(states)
        path = write_report(report_json(finding, states, self._board.rank))
        reason = str(error).partition("\n")[0]
        logger.error(
            "%s\n  rank %d can't ask the other ranks: the process group's store does not answer (%s); its host may be "
            "dead or stopped",
            report_text(finding, states, path), self._board.rank, reason,
        )  # fmt: skip
        self._session.reducer.note_failure(f"Hang report of rank {self._board.rank} alone: {finding.headline}")
