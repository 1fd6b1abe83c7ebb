"""The progress bar of a run."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(console: Console) -> Progress:
    """The bar behind a `Display`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=2)


class Display:
    """The progress bar. Redrawn seldom: the ranks need the cores."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def start(self, case: str) -> None:
        """Begin another launch."""
        self._case = case
        self._progress.reset(self._task, total=None, description=f"{case}: starting ranks")

    def update(self, what: str, done: float, total: float) -> None:
        """How far it is, as rank 0 says."""
        self._progress.update(self._task, description=f"{self._case} · {what}", completed=done, total=total)
