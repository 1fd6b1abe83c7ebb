"""What this process's training has raised last, kept as text: for reports to ranks that wait for it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

__all__ = ["install", "last", "note"]

_MAX_CHARS = 2000
_lock = threading.Lock()
_noted: dict[str, Any] | None = None
_noted_at_s = 0.0
_before: Any = None


def note(error: BaseException, where: str) -> None:
    """Remembers an exception that leaves training, in place of the one before; its frames are not kept alive.

    Args:
        error: what was raised.
        where: in what, e.g. ``"forward"``; ends the sentence "it left ... with ValueError".
    """
    global _noted, _noted_at_s
    told = _describe(error, where)
    with _lock:
        _noted, _noted_at_s = told, time.monotonic()


def last() -> dict[str, Any] | None:
    """``{"type", "message", "where", "stack", "age_s"}`` of the last exception, or None. From any thread.

    One that the main thread handles right now comes first. ``stack`` is a list of ``[file, line, function]``, innermost
    last, of where it was raised; ``age_s`` the seconds since it was noted.
    """
    handled = _handled_now()
    if handled is not None:
        return {**_describe(handled, "handled"), "age_s": 0.0}
    with _lock:
        return None if _noted is None else {**_noted, "age_s": time.monotonic() - _noted_at_s}


def install() -> None:
    """From now on also what ends the interpreter is noted; the hook that was there is called after. Once a process."""
    global _before
    if sys.excepthook is _note_uncaught:
        return
    _before = sys.excepthook
    sys.excepthook = _note_uncaught


def _note_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    try:
        note(error, "the program")
    finally:
        (_before or sys.__excepthook__)(kind, error, where)


def _handled_now() -> BaseException | None:
    current: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    if isinstance(current, tuple):  # before Python 3.12: as sys.exc_info()
        current = current[1]
    # What ends a loop or the process is no news.
    return None if isinstance(current, StopIteration | SystemExit) else current


def _describe(error: BaseException, where: str) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": type(error).__name__,
        "message": str(error)[:_MAX_CHARS],
        "where": where,
        "stack": [[frame.filename, frame.lineno, frame.name] for frame in frames],
    }
