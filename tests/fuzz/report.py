"""What is printed of the trials, and written as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.batches import Result


@dataclass(frozen=True)
class Asked:
    """What the command line said, for the command that repeats a trial."""

    seed: int
    world_size: int | None
    transport: str | None

    def command(self, trial: int) -> str:
        words = ["python -m tests.fuzz", f"--seed {self.seed}", f"--trial {trial}"]
        if self.world_size is not None:
            words.append(f"--world-size {self.world_size}")
        if self.transport is not None:
            words.append(f"--transport {self.transport}")
        return " ".join(words)


def failure(result: Result, asked: Asked) -> str:
    """All that is known of a failed trial."""
    assert result.difference is not None
    lines = [f"trial {result.trial}: {result.difference.text()}", result.program.text()]
    if not result.alone:
        lines.append("  fails after other trials in the same processes, and not alone: run all of them to repeat it")
    return "\n".join([*lines, f"  repeat: {asked.command(result.trial)}"])


def summary(results: Sequence[Result], asked: Asked) -> str:
    failed = sum(result.failed for result in results)
    wanted = sum(result.wanted is not None for result in results)
    return f"{len(results)} trials, {failed} failed (seed {asked.seed})" + (f", {wanted} by intent" if wanted else "")


def document(results: Sequence[Result], asked: Asked) -> dict[str, Any]:
    """The same as plain data."""
    return {
        **dataclasses.asdict(asked),
        "trials": len(results),
        "failed": sum(result.failed for result in results),
        "differences": [
            {
                "trial": result.trial,
                "failed": result.failed,
                "reason": result.wanted,
                "alone": result.alone,
                **dataclasses.asdict(result.difference),
                "program": result.program.text(),
                "command": asked.command(result.trial),
            }
            for result in results
            if result.difference is not None
        ],
    }
