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
_PROGRAM = "the program"
# By thread, None for what ended the program; and when. Without a lock, which a fork could leave taken.
_noted: dict[int | None, tuple[float, dict[str, Any]]] = {}
_before: Any = None


def note(error: BaseException, where: str) -> None:
    """Remembers an exception that leaves training in this thread, in place of the one before; no frame is kept alive.

    Args:
        error: what was raised.
        where: in what, e.g. ``"forward"``; ends the sentence "it left ... with ValueError".
    """
    _noted[None if where == _PROGRAM else threading.get_ident()] = (time.monotonic(), _describe(error, where))


def last(thread_id: int) -> dict[str, Any] | None:
    """``{"type", "message", "where", "stack", "age_s"}`` of a thread's last exception, or None. From any thread.

    One that it handles right now comes first; what ended the program counts as every thread's. ``stack`` is a list of
    ``[file, line, function]``, innermost last, of where it was raised; ``age_s`` the seconds since it was noted.
    """
    handled = _handled_now(thread_id)
    if handled is not None:
        return {**_describe(handled, "handled"), "age_s": 0.0}
    found = [noted for noted in (_noted.get(thread_id), _noted.get(None)) if noted is not None]
    if not found:
        return None
    noted_at_s, told = max(found, key=lambda noted: noted[0])
    return {**told, "age_s": time.monotonic() - noted_at_s}


def install() -> None:
    """From now on also what ends the interpreter is noted; the hook that was there is called after. Once a process."""
    global _before
    if sys.excepthook is _note_uncaught:
        return
    _before = sys.excepthook
    sys.excepthook = _note_uncaught


def _note_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    try:
        note(error, _PROGRAM)
    finally:
        (_before or sys.__excepthook__)(kind, error, where)


def _handled_now(thread_id: int) -> BaseException | None:
    current: Any = sys._current_exceptions().get(thread_id)
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
