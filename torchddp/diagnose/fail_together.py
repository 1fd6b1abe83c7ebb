"""An exception that ends the training loop of one rank ends those of the others.

The idea is that of Lightning's detection of deadlocks, which kills the other processes; here they come out of what they
wait in with an exception that says why, and only who does not is ended.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from torchddp import _C
from torchddp.diagnose.rank_state import note_exception
from torchddp.errors import TransportError
from torchddp.transport.board import Board
from torchddp.transport.interruptible import interrupt_all, members_of
from torchddp.transport.worker import Task, watch

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # of up to _MANY ranks: they all ask one store
_MANY = 64
_SLOWEST_LOOK_S = 1.0
_PRESS_S = 0.1  # between looks once a failure is known
_STORE_DOWN_LOOK_S = 5.0
# How long a rank whose peer seems to be gone waits to hear why, before it takes itself for the first.
_CAUSE_S = 1.0
# How long a rank stays for the others to read what was posted: it may be the one with the store.
_LINGER_S = 1.0
_MOMENT_S = 0.02
_MESSAGE_CHARACTERS = 2000
_TRACEBACK_CHARACTERS = 8000
# What torch's backends say when a peer's end of a connection is gone (gloo's errors have no type of their own), and how
# communication hooks report an error of their thread.
_PEER_WORDS = ("gloo", "connection closed", "connection reset", "ncclremoteerror", "broken pipe", "transporterror: ")


class PeerFailedError(TransportError):
    """The training loop of another rank has ended with an exception: see :func:`torchddp.fail_together`.

    Attributes:
        rank: the one that failed first, by its number in the context's process group.
        exception_type: the name of the type of its exception.
        message: what that exception said.
        step: how many steps the model of that rank had begun; None: it had none.
        remote_traceback: where it was raised there, as Python prints it.
    """

    def __init__(
        self,
        rank: int = -1,
        exception_type: str = "",
        message: str = "",
        step: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(rank, exception_type, message, step, remote_traceback)
        self.rank, self.exception_type, self.message = rank, exception_type, message
        self.step, self.remote_traceback = step, remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerFailedError, self.args  # also of the class that is made to be raised in another thread

    def __str__(self) -> str:
        when = "" if self.step is None else f" at step {self.step}"
        return f"rank {self.rank} failed{when}: {self.exception_type}: {self.message}"


@dataclass(frozen=True)
class Failure:
    """The same, as it is posted; see `PeerFailedError` for the fields."""

    rank: int
    exception_type: str
    message: str
    step: int | None
    remote_traceback: str
    is_consequence: bool  # of another rank's end, as far as this one knows

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int | None) -> Failure:
        """Of an exception that was just caught."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(
            rank=rank,
            exception_type=type(error).__name__,
            message=str(error)[:_MESSAGE_CHARACTERS],
            step=step,
            remote_traceback=trace[-_TRACEBACK_CHARACTERS:],
            is_consequence=is_consequence(error),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def error(self) -> PeerFailedError:
        """To be raised on another rank."""
        return PeerFailedError(self.rank, self.exception_type, self.message, self.step, self.remote_traceback)


def fail_together(process_group: Any = None, *, grace_s: float | None = 3.0) -> FailTogether:
    """A context for the training loop: an exception that leaves it on one rank ends it on all ranks, in seconds.

    ::

        with torchddp.fail_together():
            for batch in loader:
                train_step(batch)

    The rank whose body raises (an Exception, a KeyboardInterrupt, a SystemExit with a code other than 0) says so
    through the store of the process group, and its own exception goes on unchanged, after up to a second in which the
    others read it. The others look for that four times a second (less often beyond 64 ranks), from a thread, and then

    1. their torchddp models over this group, or over some of its ranks, stop waiting, and so do averages;
    2. PeerFailedError is raised in the body at its next Python instruction;
    3. after ``grace_s`` seconds a body that has not ended is in something that can't be interrupted (a collective of
       torch's own, ``time.sleep``, a long operator), or swallows exceptions: the process prints why and where, and ends
       with ``os._exit(1)``.

    Whatever comes out of the body then, its normal end included, is replaced with a `PeerFailedError` that names the
    rank that failed first; the exception that it replaces is its ``__cause__``. An error that is caught inside the body
    is nobody's business. A rank that dies without a word is noticed as without this context; what that raises on the
    others is left as it is, and ends those that have not noticed. A body that ends well waits for nobody.

    Not collective, but all ranks of the group must enter as many of these contexts in the same order. They may be
    nested, come one after another, and be entered again after an error once all ranks have left. Exceptions arrive in
    the thread that entered. In a forked child, with one rank or without a process group it does nothing. If the store
    does not answer it warns once, and the body goes on unwatched.

    Args:
        process_group: None is the default group.
        grace_s: seconds from the news to the end of the process; None: it is never ended so.

    Raises:
        ValueError: ``grace_s`` is negative or NaN.
        PeerFailedError: on leaving, as above.
    """
    if grace_s is not None and not grace_s >= 0:
        raise ValueError(f"grace_s must be a number of seconds from 0 on, or None for never, got {grace_s}")
    return FailTogether(process_group, grace_s)


class FailTogether(_C.AsyncGate):
    """What `fail_together` returns; to be entered once."""

    def __init__(self, process_group: Any, grace_s: float | None) -> None:
        super().__init__()
        self._group: Any = process_group
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._left = False
        self._failure: Failure | None = None  # of another rank, as seen by the watcher
        self._since_s = 0.0
        self._delivered = False
        self._counted = False  # as one that has seen a failure
        self._warned = False
        self._board: Board | None = None
        self._task: Task | None = None
        self._pid = os.getpid()  # a forked child has no watcher, and locks as they happened to be
        self._thread = 0

    # --- the thread of the body; called by AsyncGate, while nothing can be raised from outside ---

    def _begin(self) -> None:
        if self._task is not None or self._left:
            raise RuntimeError("a fail_together() context can be entered once: call fail_together() again")
        self._thread = threading.get_ident()
        self.start()

    def start(self) -> None:
        """Begins to watch if there was no process group on entering; nothing if it watches, or has been left.

        For a body that makes the default process group itself; all ranks call this at the same place after that, in the
        thread that entered.
        """
        if self._board is not None or self._left:
            return
        self._board = self._open_board()
        if self._board is not None:
            every_s = min(_SLOWEST_LOOK_S, _LOOK_S * max(1.0, self._board.size / _MANY))
            self._task = watch(self._look, every_s)

    def _leave(self, error_type: Any, error: BaseException | None, trace: Any) -> bool:
        if self._board is None or os.getpid() != self._pid:
            return False
        with self._lock:  # after this the watcher interrupts nothing any more
            self._left = True
            failure = self._failure
        if self._task is not None:
            self._task.close()
        if failure is None and error is not None and _is_failure(error):
            note_exception(error, "the training loop")
            failure = self._tell(error)
        elif failure is not None:
            self._linger()
        if failure is not None:
            raise failure.error() from error
        return False

    def _open_board(self) -> Board | None:
        if not dist.is_available() or (self._group is None and not dist.is_initialized()):
            return None
        self._group = self._group or dist.group.WORLD
        if self._group is dist.GroupMember.NON_GROUP_MEMBER or self._group.size() == 1:
            return None
        try:
            return Board(self._group, "fail_together")
        except RuntimeError as error:
            self._warn(error)
            return None

    def _tell(self, error: BaseException) -> Failure | None:
        """Posts it, unless another rank's is the cause: then that one."""
        assert self._board is not None
        try:
            mine = Failure.of(error, self._board.rank, _step_of(self._group))
            cause = self._await_first() if mine.is_consequence else None
            if cause is not None:
                # Of two ranks that miss a third one, neither knows more.
                return None if cause.is_consequence else cause
            posted = self._board.claim("first")
            if posted:
                self._board.post("first", mine.to_json())
            self._count_as_seen()
            self._linger(posted)
        except RuntimeError as problem:
            self._warn(problem)
        return None

    def _await_first(self) -> Failure | None:
        until_s = time.monotonic() + _CAUSE_S
        while (first := self._read_first()) is None and time.monotonic() < until_s:
            time.sleep(_MOMENT_S)
        return first

    def _count_as_seen(self) -> None:
        assert self._board is not None
        with self._lock:
            counted, self._counted = self._counted, True
        if not counted:
            self._board.add("seen", 1)

    def _linger(self, posted: bool = False) -> None:
        assert self._board is not None
        until_s = time.monotonic() + _LINGER_S
        try:
            # 0: all have, and it was taken away.
            while 0 < (seen := self._board.add("seen", 0)) < self._board.size and time.monotonic() < until_s:
                time.sleep(_MOMENT_S)
            if posted and seen == self._board.size:
                # A process group that is made after this one may have the same store, and the same name in it.
                self._board.forget("first", "seen")
        except RuntimeError:
            pass  # the rank with the store has left: there is nobody to wait for

    def _read_first(self) -> Failure | None:
        assert self._board is not None
        first = self._board.read("first")
        return None if first is None else Failure(**first)

    # --- the watcher ---

    def _look(self) -> None:
        assert self._task is not None and self._board is not None
        if self._failure is not None:
            self._press(self._failure)
            return
        try:
            failure = self._read_first()
            if failure is not None and failure.rank != self._board.rank:
                self._count_as_seen()
        except RuntimeError as error:
            if not self._left:
                self._warn(error)
            self._task.every_s = _STORE_DOWN_LOOK_S
            return
        if failure is None or failure.rank == self._board.rank:
            return
        with self._lock:
            if self._left:
                return
            self._failure = failure
            self._since_s = time.monotonic()
            interrupt_all(self._group, str(failure.error()))
        self._task.every_s = _PRESS_S

    def _press(self, failure: Failure) -> None:
        """The body of this rank has not ended yet."""
        if not self._delivered:
            self.raise_inside(self._error_class(failure))
        if self._grace_s is None or time.monotonic() - self._since_s < self._grace_s:
            return
        with self._lock:
            if not self._left and self.is_open:
                self._end_process(failure)

    def _error_class(self, failure: Failure) -> type[PeerFailedError]:
        """Python wants a class to raise in another thread, and makes the exception when it gets there."""
        gate = self

        class PeerFailed(PeerFailedError):
            def __init__(self, *_: object) -> None:
                gate._delivered = True
                super().__init__(*failure.error().args)

        PeerFailed.__name__, PeerFailed.__qualname__ = PeerFailedError.__name__, PeerFailedError.__qualname__
        return PeerFailed

    def _end_process(self, failure: Failure) -> None:
        assert self._board is not None
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        sys.stdout.flush()
        print(
            f"torchddp.fail_together: rank {self._board.rank} ends with exit code 1, because {failure.error()}\n"
            f"It had {self._grace_s} s to leave its training loop, and is still here:\n{stack}"
            f"What was raised on rank {failure.rank}:\n{failure.remote_traceback}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "fail_together on rank %d can't reach the store of the process group: exceptions of other ranks will "
                "not end this one's training loop. %s",
                self._board.rank if self._board is not None else self._group.rank(),
                error,
            )


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception | KeyboardInterrupt)


def _step_of(process_group: Any) -> int | None:
    steps = [member.reducer.stats()["iteration"] for member in members_of(process_group) if hasattr(member, "reducer")]
    return max(steps, default=None)


def is_consequence(error: BaseException) -> bool:
    """Whether this is what a rank raises because another one is gone."""
    if isinstance(error, TransportError | dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _PEER_WORDS)
