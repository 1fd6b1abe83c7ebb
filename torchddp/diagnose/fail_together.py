"""A failure of one rank ends the job on all ranks.

The idea comes from Lightning's deadlock detection, which kills the other processes. Here they report the reason first,
and no rank ends while one is saving.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist

from torchddp import _C
from torchddp.diagnose.rank_state import frames_of_threads, note_exception
from torchddp.durations import Duration, seconds
from torchddp.errors import TransportError
from torchddp.transport.store import Board, try_board
from torchddp.transport.worker import Task, watch

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_SLOWEST_LOOK_S = 1.0
# A rank whose watcher has been silent for so long, beyond its grace, is stuck in a call that holds the interpreter.
_STUCK_S = 5.0
_FOREVER_S = 365 * 24 * 3600.0
# How long a rank whose peer seems gone waits for the reason before it assumes that it is the first to fail.
_CAUSE_S = 1.0
# How long a failed rank stays for the others to read its post, since it may host the store.
_LINGER_S = 1.0
_MOMENT_S = 0.02
# A rank that saves shows several times a second that it lives, unless the save holds the interpreter. After so long
# without a sign it has died.
_SILENT_SAVE_S = 600.0
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
        step: its :func:`torchddp.finished_steps` when it failed.
        remote_traceback: where it was raised, as Python prints it.
    """

    __module__ = "torchddp"  # its public path

    def __init__(self, rank: int, exception_type: str, message: str, step: int, remote_traceback: str) -> None:
        super().__init__(rank, exception_type, message, step, remote_traceback)
        self.rank, self.exception_type, self.message = rank, exception_type, message
        self.step, self.remote_traceback = step, remote_traceback

    @classmethod
    def of(cls, error: BaseException, rank: int) -> PeerFailedError:
        """What this rank posts about its exception."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        said = str(error)[:_MESSAGE_CHARACTERS]
        return cls(rank, type(error).__name__, said, _C.finished_steps(), trace[-_TRACEBACK_CHARACTERS:])

    def __str__(self) -> str:
        when = f" after step {self.step}" if self.step else ""
        return f"rank {self.rank} failed{when}: {self.exception_type}: {self.message}"


def fail_together(process_group: dist.ProcessGroup | None = None, *, grace_s: Duration | None = 3.0) -> FailTogether:
    """A context for the training loop: an exception that leaves it on one rank ends all ranks within seconds.

    Example:

        with torchddp.fail_together():
            for batch in loader:
                loss_of(model(batch)).backward()
                optimizer.step()

    A rank whose body raises (anything but a GeneratorExit, or a SystemExit with code 0) posts the failure in the
    process group's store. Its own exception continues unchanged, once the others have read the post (at most a second)
    and none of them is saving (:func:`torchddp.finish_first`). A thread on the other ranks checks for posts four times
    a second (less often beyond 64 ranks), and logs what failed. Nothing is raised into the body:

    - if it ends within ``grace_s`` seconds, with an error of its own because the peer is gone, or normally, the context
      raises `PeerFailedError`, which names the rank that failed first. Its ``__cause__`` is the error of the body;
    - otherwise the process prints where the body is, and ends with ``os._exit(1)``, once no rank is saving.

    Errors caught inside the body are not reported. The error on ranks that notice a silent death ends those that have
    not noticed it yet. A body that ends normally before a failure is known returns at once.

    Not collective, but all ranks of the group must enter the same number of these contexts in the same order; they may
    be nested, or entered again after an error once all ranks have left. In a forked child, with one rank or without a
    process group it does nothing. If the store doesn't answer, it warns once.

    Args:
        process_group: None is the default group.
        grace_s: seconds (or a timedelta) from the notification to the end of the process; None: never end it.

    Raises:
        TypeError, ValueError: ``grace_s`` is not a duration, negative or NaN.
        PeerFailedError: on leaving, as above.
    """
    return FailTogether(process_group, seconds(grace_s, "grace_s"))


@contextmanager
def finish_first() -> Iterator[None]:
    """A context for what a failure elsewhere must not cut short, such as writing a checkpoint.

    Example:

        with torchddp.finish_first():
            torch.save(model.state_dict(), path)

    If another rank fails under :func:`torchddp.fail_together`, this process ends when the body has, however long that
    takes. Until then the other ranks stay too, unless this one dies: launchers such as torchrun kill all processes when
    the first one ends with an error. The body must not wait for other ranks, which may have failed. Not collective;
    from any thread. Outside of fail_together() it does nothing.
    """
    held = list(_watching)
    for context in held:
        context.hold(1)
    try:
        yield
    finally:
        for context in held:
            context.hold(-1)


class FailTogether:
    """The result of `fail_together`; can be entered once."""

    def __init__(self, process_group: dist.ProcessGroup | None, grace_s: float | None) -> None:
        self._group: Any = process_group  # or what new_group() returns on ranks that it leaves out
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._left = False
        self._failure: PeerFailedError | None = None  # another rank's, as seen by the watcher
        self._since_s = 0.0
        self._knows = False  # whether "known" counts this rank
        self._holds = 0
        self._save_signs, self._sign_seen_s = 0, 0.0
        self._warned = False
        self._board: Board | None = None
        self._task: Task | None = None
        self._guard: _C.FailureGuard | None = None
        self._pid = os.getpid()  # a forked child has no watcher, and locks in an unknown state
        self._thread = 0

    # --- on the body's thread ---

    def __enter__(self) -> FailTogether:
        if self._thread:
            raise RuntimeError("a fail_together() context can be entered once: call fail_together() again")
        self._thread = threading.get_ident()
        self.start()
        return self

    def start(self) -> None:
        """Start watching if there was no process group on entering; does nothing if it already watches or was left.

        For a body that creates the default process group itself; all ranks then call this at the same place.
        """
        if self._board is not None or self._left:
            return
        self._group = self._group or dist.group.WORLD
        if self._group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            self._board = try_board(self._group, "fail_together", self._warn)
        if self._board is not None:
            _watching.append(self)
            self._board.link.hold(1)  # the body may destroy the group before its exception gets here
            self._task = watch(self._look, min(_SLOWEST_LOOK_S, _LOOK_S * self._board.load))
            self._guard = self._open_guard(self._board)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._board is None or self._task is None or os.getpid() != self._pid:
            self._left = True
            return
        with self._lock:  # from here on the watcher ends nothing
            self._left = True
            failure = self._failure
        self._task.close()
        self._guard = None
        _watching.remove(self)
        try:
            if failure is not None:
                self._stay(self._board)
            elif error is not None and _is_failure(error):
                note_exception(error, "the training loop")
                failure = self._report(self._board, error)
        except RuntimeError as problem:
            self._warn(problem)
        finally:
            self._board.link.hold(-1)
        if failure is not None:
            raise failure from error

    def _open_guard(self, board: Board) -> _C.FailureGuard | None:
        """See Note [A stuck interpreter] in csrc/transport/c10d/failure_guard.h."""
        if self._grace_s is None:
            return None
        patience_s = min(self._grace_s + _STUCK_S, _FOREVER_S)
        words = (
            f"torchddp.fail_together: rank {board.rank} ends with exit code 1, because another rank failed, and this "
            f"one's interpreter has been stuck for more than {patience_s:g} s in a call that holds the "
            "global interpreter lock\n"
        )
        try:
            store = board.open_store()
        except RuntimeError as error:
            self._warn(error)
            return None
        return _C.FailureGuard(store, "first", "saving/sum", datetime.timedelta(seconds=patience_s), words)

    def _report(self, board: Board, error: BaseException) -> PeerFailedError | None:
        """Post the failure, unless another rank's is the cause; in that case return that one."""
        until_s = time.monotonic() + (_CAUSE_S if is_consequence(error) else 0.0)
        cause = None
        while cause is None and time.monotonic() < until_s:
            cause = self._read_first(board)
            time.sleep(_MOMENT_S)
        posts = cause is None and board.claim("first")
        if posts:
            board.post("first", PeerFailedError.of(error, board.rank).args)
        self._read_first(board)
        self._stay(board, posts)
        return cause

    def _stay(self, board: Board, posted: bool = False) -> None:
        """Wait until all ranks know of the failure, which takes a moment, and for those that save."""
        since_s = time.monotonic()
        with suppress(RuntimeError):  # the rank with the store has left: nothing to wait for
            while True:
                known = board.add("known", 0)  # 0: all know, and it was removed
                lingered = time.monotonic() - since_s > _LINGER_S
                if (lingered or not 0 < known < board.size) and not self._is_anyone_saving(board):
                    break
                time.sleep(_MOMENT_S)
            if posted and known == board.size:
                board.forget("first", "known")  # a later process group may use the same store with the same name

    # --- on any thread ---

    def hold(self, change: int) -> None:
        """A save begins (1) or ends (-1)."""
        if self._board is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._holds += change
        try:
            self._board.add("saving", change)
        except RuntimeError as error:
            self._warn(error)

    def _is_anyone_saving(self, board: Board) -> bool:
        """Whether a save has begun on some rank and not ended, and that rank lives. Shows that this one does."""
        signs = board.add("signs", 1 if self._holds else 0)
        now_s = time.monotonic()
        if signs != self._save_signs or not self._sign_seen_s:
            self._save_signs, self._sign_seen_s = signs, now_s
        return board.add("saving", 0) > 0 and (self._holds > 0 or now_s - self._sign_seen_s < _SILENT_SAVE_S)

    def _read_first(self, board: Board) -> PeerFailedError | None:
        """The first failure, which this rank then counts as known."""
        first = board.read("first")
        if first is None:
            return None
        with self._lock:
            knew, self._knows = self._knows, True
        if not knew:
            board.add("known", 1)
        return PeerFailedError(*first)

    # --- the watcher ---

    def _look(self) -> None:
        assert self._task is not None and self._board is not None
        if (guard := self._guard) is not None:
            guard.sign(self._holds > 0)
        if self._failure is not None:
            self._end_if_due(self._board, self._failure)
            return
        try:
            failure = self._read_first(self._board)
        except RuntimeError as error:
            if not self._left:
                self._warn(error)
            return
        if failure is None or failure.rank == self._board.rank:
            return
        with self._lock:
            if self._left:
                return
            self._failure, self._since_s = failure, time.monotonic()
        self._task.every_s = _LOOK_S
        ends = "" if self._grace_s is None else f" This process ends in {self._grace_s:g} s unless its loop ends first."
        logger.error("rank %d: %s.%s\n%s", self._board.rank, failure, ends, failure.remote_traceback)

    def _end_if_due(self, board: Board, failure: PeerFailedError) -> None:
        saves = False
        with suppress(RuntimeError):  # the rank with the store may have left
            saves = self._is_anyone_saving(board)
        if self._grace_s is None or time.monotonic() - self._since_s < self._grace_s:
            return
        with self._lock:
            if self._left or saves or self._holds:
                return
            try:
                frames = reversed(frames_of_threads().get(self._thread, []))
                stack = "".join(traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames).format())
                print(
                    f"torchddp.fail_together: rank {board.rank} ends with exit code 1, because {failure}\n"
                    f"It had {self._grace_s:g} s to leave its training loop, and is still here:\n{stack}",
                    file=sys.stderr,
                    flush=True,
                )
                sys.stdout.flush()
            finally:  # also if a stream is closed, or nobody reads it
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


_watching: list[FailTogether] = []  # the contexts of this process that watch


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return not isinstance(error, GeneratorExit)  # torch.distributed.checkpoint's errors are no `Exception`


def is_consequence(error: BaseException) -> bool:
    """Whether a rank raises this because another one is gone."""
    if isinstance(error, TransportError | dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _PEER_WORDS)
