"""The hang monitor, one per job in a process: docs/hang_reports.md. It checks this rank's waits, asks the other ranks
when one lasts too long, answers their questions, and lets one rank report.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from torchddp import _torch, notices
from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose import rank_state
from torchddp.diagnose.collectives import CallWatch
from torchddp.diagnose.diagnosis import Finding, diagnose, report_text, write_report
from torchddp.diagnose.flight_recorder import write_traces
from torchddp.diagnose.pending import PendingWatch
from torchddp.diagnose.rank_state import RankState
from torchddp.transport.store import Board, home_of, try_board
from torchddp.transport.waits import GONE, STOPPED, is_here, look_up, process_identity
from torchddp.transport.worker import Task, watch

logger = logging.getLogger("torchddp.hang")

_AGAIN = 4.0  # a lasting stall is reported again once it is this many times longer
_SAME_S = 0.3  # a wait that began at most this much earlier or later is the same
_MAX_POLL_S = 1.0
_MOST_KNOWN = 64  # ranks whose processes are looked up
_QUICK_S = 0.05  # between checks, while ranks are being asked
_KNOWN_A_LOOK = 8  # ranks whose processes are looked up per check
_MOST_LOOKS = 100  # checks after which a rank that has not identified its process never will
_GIVE_UP_ROUNDS = 10  # collection times after which ranks stop waiting for a report


# Number of models so far, by process group; equal on all ranks.
_models: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class HangReports(StepObserver):
    """The waits of one model, which it does not keep alive. ``stall_s``: how long until the other ranks are asked.

    Not collective, but all ranks must create the same number in the same order. There are no reports for a copy of a
    model, a group of one rank, and a group without a store for the ranks to communicate through.
    """

    def __init__(self, session: ReducerSession) -> None:
        self.before_step()  # until the first step, the thread that wraps the model
        self.stall_s = session.stall_limit_s
        self._session: ReducerSession = weakref.proxy(session)
        group = session.process_group
        self.members = dist.get_process_group_ranks(group) if _torch.is_alive(group) else list(range(group.size()))
        self._rank = session.rank
        is_alone = session.is_copy or self.stall_s == 0 or group.size() == 1
        self.monitor = None if is_alone else monitor_of(home_of(group))
        if self.monitor is not None:
            number = _models[group] = _models.get(group, -1) + 1
            self.key = f"{_torch.name_of(group)}/{number}"
            self.monitor.add(self)

    def before_step(self) -> None:
        """Record this thread as the training thread, whose stack and exceptions a report shows."""
        rank_state.training.thread = threading.get_ident()

    def on_error(self, error: BaseException) -> None:
        rank_state.note_exception(error, "forward")

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.remove(self)
        self.monitor = None

    # --- for the monitor ---

    @property
    def is_gone(self) -> bool:
        return self._status() is None

    @property
    def since_s(self) -> float | None:
        """When it began to wait for other ranks, in seconds of the monotonic clock; None if it does not wait."""
        status = self._status()
        return time.monotonic() - status["waited_s"] if status is not None and status["phase"] == "waiting" else None

    def describe(self, state: RankState, asked: str) -> None:
        """Add this model to the rank's state if it is the one asked about, waits, or has done more steps."""
        status = self._status()
        if status is None:
            return
        own = (self.key == asked, status["phase"] == "waiting", status["step"])
        if state.model and own <= (state.model == asked, state.waits, state.step):
            return
        state.model, state.members = self.key, self.members
        state.take_status(status)

    def set_peers(self, known: dict[int, dict[str, Any]]) -> None:
        """Learn the processes of more ranks: the model's transport errors then say which of them are gone."""
        here = [(rank, who) for rank, who in known.items() if rank in self.members and is_here(who)]
        peers = [(self.members.index(rank), who["pid"], who["started"]) for rank, who in here]
        with contextlib.suppress(ReferenceError):
            self._session.reducer.set_peers([peer for peer in peers if peer[0] != self._rank])

    def fail_with(self, found: str) -> None:
        with contextlib.suppress(ReferenceError):
            self._session.reducer.note_failure(found)

    def interrupt(self, reason: str) -> None:
        with contextlib.suppress(ReferenceError):
            self._session.reducer.transport.interrupt(reason)

    def _status(self) -> dict[str, Any] | None:
        with contextlib.suppress(ReferenceError):
            return self._session.reducer.status()
        return None


class Wait(NamedTuple):
    """A wait of this rank in a step or a call: of what, since when, and after how long the other ranks are asked."""

    key: Hashable
    since_s: float
    limit_s: float

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since_s


@dataclass(frozen=True)
class Question:
    """A waiting rank's question to all ranks. ``model``: whose reduction waits."""

    number: int
    model: str
    waited_s: float
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begun_s


class HangMonitor:
    """A task on the watcher. Nothing here is collective, raises into training, or keeps a model or process group alive.

    A forked child is not a rank: its copy neither checks nor reports anything.

    Keys on the board, which is over all ranks of the job: ``who/R`` (a rank's process), ``left/R`` (why it no longer
    takes part), ``request`` (the last question), ``answer/N/R`` (a `RankState`) and ``report/N`` of question N; and
    ``leaving``: the last departure from a group by ranks that look for survivors, and the group's ranks.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._models: list[HangReports] = []
        self._calls, self._pending = CallWatch(), PendingWatch()
        self._reported: dict[Hashable, Wait] = {}  # the waits of the last question, with the limit for the next one
        self._round: Question | None = None
        self._last_number = 0
        self._known: dict[int, dict[str, Any]] = {}
        self._knows_all, self._looks = False, 0
        self._departures: set[str] = set()  # in which this rank has taken part
        self._pid = os.getpid()  # a forked child has no watcher, and locks in an unknown state
        rank_state.note_uncaught()
        # Runs before the watcher's own exit handler, which was registered earlier.
        self._at_exit = lambda: self.close("" if board.link.is_over else "its program has ended")
        atexit.register(self._at_exit)
        with contextlib.suppress(RuntimeError):  # a report will say less about this rank
            board.start_post_own("who", process_identity())
        self._task: Task = watch(self._look, _QUICK_S)
        board.link.at_end(self._end)

    # --- its models; from any thread ---

    def add(self, model: HangReports) -> None:
        model.set_peers(dict(self._known))
        self._models = [*self._models, model]

    def remove(self, model: HangReports) -> None:
        self._models = [other for other in self._models if other is not model]

    def join_departure(self, name: str) -> None:
        """This rank gives up a group of which ranks have died; they all use the same name, and only this time."""
        self._departures.add(name)

    def call_to_depart(self, name: str, members: list[int]) -> None:
        """End waits in the group on ranks that have not given it up: they may wait for one that has, without a sign.

        RuntimeError if the store does not answer.
        """
        self._board.post("leaving", (name, members))

    @property
    def stall_s(self) -> float:
        """The smallest limit of its models; a rank without any uses a default."""
        return min((model.stall_s for model in self._models), default=4 * _MAX_POLL_S)

    @property
    def _poll_s(self) -> float:
        return min(_MAX_POLL_S, self.stall_s / 4) * self._board.load

    @property
    def _collect_s(self) -> float:
        return 2 * self._poll_s + 0.2

    def is_of(self, home: dist.ProcessGroup) -> bool:
        return not self._task.closed and self._board.link.is_of(home)

    def close(self, why: str = "") -> None:
        """End the task; ``why`` is posted for the other ranks if their store still answers."""
        atexit.unregister(self._at_exit)
        if self._task.closed or os.getpid() != self._pid:
            return
        self._task.close()
        self._calls.forget()
        for key in [key for key, monitor in _monitors.items() if monitor is self]:
            del _monitors[key]
        if why:
            noted = rank_state.last_exception(rank_state.training.thread)
            ended = noted is not None and noted["where"] in rank_state.ENDS
            after = f" after {noted['type']}: {noted['message']}" if noted is not None and ended else ""
            with contextlib.suppress(Exception):
                self._board.post_own("left", why + after)

    # --- the task ---

    def _end(self) -> None:
        self.close("its process group was destroyed")

    def _look(self) -> None:
        try:
            self._look_once()
        except Exception:
            # An error of the monitor itself: training continues without it.
            logger.debug("rank %d: checking the rank's waits failed", self._board.rank, exc_info=True)
        busy = self._round is not None or not self._knows_all
        self._task.every_s = min(_QUICK_S, self._poll_s) if busy else self._poll_s

    def _look_once(self) -> None:
        for model in self._models:
            if model.is_gone:
                self.remove(model)
        waits = self._waits()
        self._reported = {
            wait.key: reported
            for wait in waits
            if (reported := self._reported.get(wait.key)) and abs(wait.since_s - reported.since_s) < _SAME_S
        }
        limits_s = (max(wait.limit_s, self._reported.get(wait.key, wait).limit_s) for wait in waits)
        stalls = [wait for wait, limit_s in zip(waits, limits_s, strict=True) if wait.waited_s >= limit_s]
        longest_s = max((wait.waited_s for wait in stalls), default=0.0)
        try:
            self._talk(waits, longest_s)
        except Exception as error:
            if not stalls:
                raise
            self._report_alone(waits, error)

    def _waits(self) -> list[Wait]:
        """Without a model there is no limit, and none."""
        if not self._models:
            self._calls.forget()
            return []
        in_steps = [Wait(model.key, since_s, model.stall_s) for model in self._models if (since_s := model.since_s)]
        calls = self._calls.look(self.stall_s)
        is_known = in_steps or any(call.thread == rank_state.training.thread for call in calls)
        pending = [] if is_known else self._pending.look(self.stall_s)
        return [
            *in_steps,
            *(Wait(call.key, call.since_s, self.stall_s if call.is_certain else math.inf) for call in calls),
            *(Wait(state.identity, time.monotonic() - state.waited_s, self.stall_s) for state in pending),
        ]

    def _note_reported(self, waits: list[Wait], asked_s: float) -> None:
        """``asked_s``: the wait that the ranks were asked about."""
        self._reported = {wait.key: wait._replace(limit_s=_AGAIN * max(wait.waited_s, asked_s)) for wait in waits}

    def _talk(self, waits: list[Wait], stalled_s: float) -> None:
        if not self._knows_all:
            self._look_up_peers()
        self._follow_departure()
        request = self._board.read("request")
        number = request["number"] if request else 0
        if number > self._last_number:
            self._join_round(Question(**request), waits)
        elif stalled_s and self._round is None:
            state = self._own_state("")
            model = state.model if state.waits else ""
            asked = Question(self._last_number + 1, model, stalled_s)
            self._board.post("request", {"number": asked.number, "model": model, "waited_s": asked.waited_s})
            self._join_round(asked, waits)
        if self._round is not None:
            self._go_on(self._round)

    def _follow_departure(self) -> None:
        name, members = self._board.read("leaving") or ("", [])
        if name and name not in self._departures:
            for model in self._models:
                if set(model.members) <= set(members):
                    model.interrupt("other ranks have given up this process group, and look for survivors")

    def _look_up_peers(self) -> None:
        """A few ranks' processes per check, so that dead ones are recognized even when the store has stopped."""
        unknown = [rank for rank in range(min(self._board.size, _MOST_KNOWN)) if rank not in self._known]
        found = {rank: who for rank in unknown[:_KNOWN_A_LOOK] if (who := self._board.read(f"who/{rank}"))}
        if found:
            self._known |= found
            for model in self._models:
                model.set_peers(dict(self._known))
        self._looks += 1
        self._knows_all = len(found) == len(unknown) or self._looks > _MOST_LOOKS

    # --- a question to all ranks ---

    def _join_round(self, joined: Question, waits: list[Wait]) -> None:
        self._round, self._last_number = joined, joined.number
        self._note_reported(waits, joined.waited_s)
        self._board.post(f"answer/{joined.number}/{self._board.rank}", asdict(self._own_state(joined.model)))

    def _own_state(self, asked: str) -> RankState:
        thread = rank_state.training.thread
        state = RankState(self._board.rank, phase=rank_state.NO_MODEL, thread=thread)
        state.who = process_identity()
        state.exception = rank_state.last_exception(thread)
        state.stack = rank_state.stack_of(thread)
        state.calls = self._calls.states()
        for model in self._models:
            model.describe(state, asked)
        if not state.waits and state.training_call is None:
            state.calls += self._pending.states()
        return state

    def _go_on(self, asked: Question) -> None:
        found = self._board.read(f"report/{asked.number}")
        if found is not None:
            self._round = None
            if found:
                self._fail_models(found)
            return
        if asked.age_s > _GIVE_UP_ROUNDS * self._collect_s:
            self._round = None
            return
        states = self._answers(asked) if self._may_report(asked) else None
        if states is not None and self._board.claim(f"report/{asked.number}"):
            self._board.post(f"report/{asked.number}", self._report(asked, states))

    def _may_report(self, asked: Question) -> bool:
        """Whether it is this rank's turn: rank 0 first, the others if it has not answered or has had enough time."""
        if self._board.rank == 0:
            return True
        if asked.age_s < 1.5 * self._collect_s:
            return False
        return asked.age_s > 4 * self._collect_s or self._board.read(f"answer/{asked.number}/0") is None

    def _answers(self, asked: Question) -> list[RankState] | None:
        """The states by rank; None if it is too early, or another rank's turn."""
        answers = self._board.read_of_ranks(f"answer/{asked.number}")
        if None in answers and asked.age_s < self._collect_s:
            return None
        answering = [rank for rank, values in enumerate(answers) if values is not None]
        # Among ranks that answer, lower ones take their turn earlier.
        turn = answering.index(self._board.rank) if self._board.rank in answering else len(answering)
        if self._board.rank > 0 and asked.age_s < (1.5 + turn) * self._collect_s:
            return None
        return [
            self._silent_state(rank) if values is None else RankState.from_json(values)
            for rank, values in enumerate(answers)
        ]

    def _silent_state(self, rank: int) -> RankState:
        who = self._known.get(rank) or self._board.read(f"who/{rank}")
        left = self._board.read(f"left/{rank}") or ""
        return RankState(rank, who=who, left=left, alive=look_up(who) or "")

    # --- reports ---

    def _report(self, asked: Question, states: list[RankState]) -> str:
        """Print the finding; returns what errors should say about it."""
        if states[self._board.rank].has_moved(self._own_state(asked.model)):
            return ""  # the stall ended while ranks were being asked, so their answers don't fit together
        if max((state.longest_wait_s for state in states), default=0.0) < self.stall_s:
            return ""
        finding, text = self._published(states)
        folder = write_traces(states, finding)
        logger.error("%s", text if folder is None else f"{text}\n  for torchfrtrace: {folder}")
        return f"Hang report: {finding.headline}"

    def _report_alone(self, waits: list[Wait], error: Exception) -> None:
        """The store does not answer: report what this rank knows."""
        self._note_reported(waits, 0.0)
        self._round = None
        known = {rank: who for rank, who in self._known.items() if rank != self._board.rank}
        others = [RankState(rank, who=who, alive=look_up(who) or "") for rank, who in known.items()]
        states = [self._own_state(""), *(state for state in others if state.alive in (GONE, STOPPED))]
        finding, text = self._published(states)
        logger.error(
            "%s\n  rank %d can't ask the other ranks: the process group's store does not answer (%s); its host may be "
            "dead or stopped",
            text, self._board.rank, str(error).partition("\n")[0],
        )  # fmt: skip
        self._fail_models(f"Hang report of rank {self._board.rank} alone: {finding.headline}")

    def _published(self, states: list[RankState]) -> tuple[Finding, str]:
        finding = diagnose(states)
        path = write_report(finding, states, self._board.rank)
        notices.tell("hang_report", headline=finding.headline, step=finding.step, path=str(path or ""))
        return finding, report_text(finding, states, path)

    def _fail_models(self, found: str) -> None:
        for model in self._models:
            model.fail_with(found)


# Those that are open, by id of the home group.
_monitors: dict[int, HangMonitor] = {}
os.register_at_fork(after_in_child=_monitors.clear)


def open_monitor_of(home: dist.ProcessGroup) -> HangMonitor | None:
    found = _monitors.get(id(home))
    return found if found is not None and found.is_of(home) else None


def monitor_of(home: dist.ProcessGroup) -> HangMonitor | None:
    """The job's monitor, created if missing (then by all ranks); None for a job of one rank or without a store."""
    found = open_monitor_of(home)
    if found is not None:
        return found
    board = try_board(home, "hang", lambda error: logger.debug("no hang reports: %s", error))
    if board is not None:
        found = _monitors[id(home)] = HangMonitor(board)
    return found
