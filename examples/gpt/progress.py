"""Progress output of rank 0: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """A context manager that shows the steps and evaluations of one run."""

    def __init__(self, *, name: str, first_step: int, last_step: int, total_steps: int, shown: bool) -> None:
        self._shown = shown
        self._name = name
        self._total_steps = total_steps
        self._line_every = max(1, (last_step - first_step) // 10)
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if shown and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )
            self._task = self._progress.add_task(name, total=total_steps, completed=first_step, loss="...")

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._shown:
            self._console.print(text, markup=False)

    def step(self, number: int, loss: float, step_ms: float) -> None:
        """Report that `number` steps are done; `loss` is this rank's."""
        if self._progress is not None:
            self._progress.update(self._task, completed=number, loss=f"{loss:.3f}")
        elif number % self._line_every == 0:
            self.say(f"{self._name}: step {number}/{self._total_steps}  loss {loss:.3f}  {step_ms:.0f} ms")

    def evaluation(self, number: int, train_loss: float, validation_loss: float) -> None:
        """Report the losses after `number` steps, averaged over the ranks."""
        self.say(
            f"{self._name}: step {number}/{self._total_steps}  "
            f"train loss {train_loss:.4f}  validation loss {validation_loss:.4f}"
        )
