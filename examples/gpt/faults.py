"""Injected faults, and a journal of events."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

FAULT_CHOICES = ("kill", "exception", "stop")


class InjectedFaultError(RuntimeError):
    """Raised by the fault "exception"."""


@dataclass(frozen=True)
class Event:
    """One line of the journal. `attempt` counts torchrun's restarts; `time_s` is the wall-clock time."""

    kind: str
    attempt: int
    rank: int
    step: int
    time_s: float
    text: str = ""


class Journal:
    """A file that all ranks of all attempts append to; its lines survive when the process is killed."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        path.parent.mkdir(parents=True, exist_ok=True)

    def note(self, kind: str, step: int, text: str = "") -> None:
        event = Event(kind, self.attempt, self.rank, step, time.time(), text)
        line = (json.dumps(asdict(event)) + "\n").encode()
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def read_journal(path: Path) -> list[Event]:
    """All events so far, oldest first."""
    events = [Event(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(events, key=lambda event: event.time_s)


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in one step, injected once over all attempts: the file `marker` records that it happened."""

    step: int
    rank: int
    how: str
    marker: Path

    def strike(self, step: int, journal: Journal, parameter: torch.Tensor) -> None:
        """Inject the fault if it is due. Call before each step, counted from 1.

        Kills and stops happen later in the step, when backward reaches `parameter`.
        """
        if step != self.step or journal.rank != self.rank or self.marker.exists():
            return
        self.marker.touch()
        if self.how == "exception":
            journal.note("fault", step, self.how)
            raise InjectedFaultError(f"rank {self.rank} raised the injected exception in step {step}")
        number = signal.SIGKILL if self.how == "kill" else signal.SIGSTOP

        def send_signal(grad: Any) -> None:
            handle.remove()
            journal.note("fault", step, self.how)
            os.kill(os.getpid(), number)

        handle = parameter.register_hook(send_signal)
