"""An exception that ends the training loop on one rank ends it on the others.

The idea comes from Lightning's deadlock detection, which kills the other processes. Here the others leave their waits
with an exception that names the cause, and only a process that can't is ended.
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

_LOOK_S = 0.25  # for up to _MANY ranks, which all ask the same store
_MANY = 64
_SLOWEST_LOOK_S = 1.0
_PRESS_S = 0.1  # between checks once a failure is known
_STORE_DOWN_LOOK_S = 5.0
# How long a rank whose peer seems gone waits for the reason before it assumes that it is the first to fail.
_CAUSE_S = 1.0
# How long a failed rank stays for the others to read its post, since it may host the store.
_LINGER_S = 1.0
_MOMENT_S = 0.02
_MESSAGE_CHARACTERS = 2000
_TRACEBACK_CHARACTERS = 8000
# What torch's backends say when a peer has closed its connection (gloo's errors have no type of their own), and how
# communication hooks report an error of their thread.
_PEER_WORDS = ("gloo", "connection closed", "connection reset", "ncclremoteerror", "broken pipe", "transporterror: ")


class PeerFailedError(TransportError):
    """The training loop of another rank ended with an exception: see :func:`torchddp.fail_together`.

    Attributes:
        rank: the rank that failed first, in the context's process group.
        exception_type: the name of its exception's type.
        message: the exception's message.
        step: how many steps that rank's model had begun; None: it had no model.
        remote_traceback: where it was raised, as Python prints it.
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
        return PeerFailedError, self.args  # also for the class created to be raised in another thread

    def __str__(self) -> str:
        when = "" if self.step is None else f" at step {self.step}"
        return f"rank {self.rank} failed{when}: {self.exception_type}: {self.message}"


@dataclass(frozen=True)
class Failure:
    """A failure as it is posted; see `PeerFailedError` for the fields."""

    rank: int
    exception_type: str
    message: str
    step: int | None
    remote_traceback: str
    is_consequence: bool  # whether it results from another rank's end, as far as this rank knows

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int | None) -> Failure:
        """From an exception that was just caught."""
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
        """The exception to raise on another rank."""
        return PeerFailedError(self.rank, self.exception_type, self.message, self.step, self.remote_traceback)


def fail_together(process_group: Any = None, *, grace_s: float | None = 3.0) -> FailTogether:
    """A context for the training loop: an exception that leaves it on one rank ends it on all ranks within seconds.

    Example:

        with torchddp.fail_together():
            for batch in loader:
                loss_of(model(batch)).backward()
                optimizer.step()

    A rank whose body raises (an Exception, a KeyboardInterrupt, or a SystemExit with a code other than 0) posts the
    failure in the process group's store. Its own exception continues unchanged, after up to a second in which the
    others read the post. A thread on the other ranks checks for posts four times a second (less often beyond 64 ranks).
    Then

    1. their torchddp models and averagers over this group, or over some of its ranks, stop waiting;
    2. PeerFailedError is raised in the body at its next Python instruction;
    3. if the body has not ended after ``grace_s`` seconds, it is in something uninterruptible (a collective of torch's
       own, ``time.sleep``, a long operator) or swallows exceptions: the process prints why and where, and ends with
       ``os._exit(1)``.

    However the body then ends, even normally, the result is a `PeerFailedError` that names the rank that failed first,
    with any replaced exception as its ``__cause__``. Errors caught inside the body are not reported. A rank that dies
    silently is noticed as it would be without this context; the error on the ranks that notice is the same, and ends
    the ranks that have not noticed yet. A body that ends normally waits for no one.

    Not collective, but all ranks of the group must enter the same number of these contexts in the same order. They may
    be nested, used one after another, and entered again after an error once all ranks have left. Exceptions arrive in
    the thread that entered. In a forked child, with one rank or without a process group it does nothing. If the store
    doesn't answer, it warns once and the body continues unwatched.

    Args:
        process_group: None is the default group.
        grace_s: seconds from the notification to the end of the process; None: never end it.

    Raises:
        ValueError: ``grace_s`` is negative or NaN.
        PeerFailedError: on leaving, as above.
    """
    if grace_s is not None and not grace_s >= 0:
        raise ValueError(f"grace_s must be a number of seconds from 0 on, or None for never, got {grace_s}")
    return FailTogether(process_group, grace_s)


class FailTogether(_C.AsyncGate):
    """The result of `fail_together`; can be entered once."""

    def __init__(self, process_group: Any, grace_s: float | None) -> None:
        super().__init__()
        self._group: Any = process_group
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._left = False
        self._failure: Failure | None = None  # another rank's, as seen by the watcher
        self._since_s = 0.0
        self._delivered = False
        self._counted = False  # whether "seen" includes this rank
        self._warned = False
        self._board: Board | None = None
        self._task: Task | None = None
        self._pid = os.getpid()  # a forked child has no watcher, and locks in an unknown state
        self._thread = 0

    # --- on the body's thread; called by AsyncGate, while nothing can be raised from outside ---

    def _begin(self) -> None:
        if self._task is not None or self._left:
            raise RuntimeError("a fail_together() context can be entered once: call fail_together() again")
        self._thread = threading.get_ident()
        self.start()

    def start(self) -> None:
        """Start watching if there was no process group on entering; does nothing if it already watches or was left.

        For a body that creates the default process group itself; afterwards all ranks call this at the same place, in
        the thread that entered.
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
        with self._lock:  # from here on the watcher interrupts nothing
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
        """Post the failure, unless another rank's is the cause; in that case return that one."""
        assert self._board is not None
        try:
            mine = Failure.of(error, self._board.rank, _step_of(self._group))
            cause = self._await_first() if mine.is_consequence else None
            if cause is not None:
                # If both ranks miss a third one, neither knows more than the other.
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
            # 0: all have read it, and it was removed.
            while 0 < (seen := self._board.add("seen", 0)) < self._board.size and time.monotonic() < until_s:
                time.sleep(_MOMENT_S)
            if posted and seen == self._board.size:
                # A later process group may use the same store with the same name.
                self._board.forget("first", "seen")
        except RuntimeError:
            pass  # the rank with the store has left, so there is no one to wait for

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
        """The body on this rank has not ended yet."""
        if not self._delivered:
            self.raise_inside(self._error_class(failure))
        if self._grace_s is None or time.monotonic() - self._since_s < self._grace_s:
            return
        with self._lock:
            if not self._left and self.is_open:
                self._end_process(failure)

    def _error_class(self, failure: Failure) -> type[PeerFailedError]:
        """Python needs a class to raise in another thread, and creates the exception once it gets there."""
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
    """Whether a rank raises this because another one is gone."""
    if isinstance(error, TransportError | dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _PEER_WORDS)
