"""What happened in this process, for whoever counts or exports it: hang reports, stragglers, stop requests, retries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger(__name__)

Kind = Literal["hang_report", "straggler", "straggler_over", "stop_request", "retry"]


@dataclass(frozen=True)
class Notice:
    """``details`` depend on the kind; all are strings, numbers, or lists of numbers."""

    kind: Kind
    details: Mapping[str, Any]


_listeners: list[Callable[[Notice], object]] = []


def listen(listener: Callable[[Notice], object]) -> Callable[[], None]:
    """Call ``listener`` with each notice from now on, on the thread where it happens. Returns what ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener) if listener in _listeners else None


def tell(kind: Kind, **details: Any) -> None:
    """Pass on what happened. A listener that raises is logged: it must not end training."""
    for listener in list(_listeners):
        try:
            listener(Notice(kind, details))
        except Exception:
            logger.exception("a listener of torchddp's notices failed")
