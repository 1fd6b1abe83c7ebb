"""Runs programs on ranks: several in a row on the same processes, which are restarted after a failure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.fuzz.compare import Difference
from tests.fuzz.program import Do, Program
from tests.fuzz.run import AGREEMENT_TIMEOUT_S, run_batch
from tests.fuzz.wanted import ENDED_ITSELF, reason_for
from tests.harness import Outcome, run_outcomes

BATCH = 8
TRIAL_LIMIT_S = 90.0
STRAGGLER_S = 6.0


@dataclass(frozen=True)
class Result:
    trial: int
    program: Program
    difference: Difference | None = None
    wanted: str | None = None  # why this difference is intended
    alone: bool = True  # it also failed as the only program of its processes

    @property
    def failed(self) -> bool:
        return self.difference is not None and self.wanted is None

    def text(self) -> str:
        assert self.difference is not None
        lines = [f"trial {self.trial}: {self.difference.text()}", self.program.text()]
        if not self.alone:
            lines.append("  fails after other trials in the same processes, not alone: run all of them to repeat it")
        return "\n".join(lines)


def run_trials(programs: dict[int, Program], ddp_class: type, limit_s: float = TRIAL_LIMIT_S) -> Iterator[Result]:
    """A result for each trial as it finishes; trials are grouped by world size, so not in order."""
    for world_size in sorted({program.world_size for program in programs.values()}):
        left = [trial for trial, program in programs.items() if program.world_size == world_size]
        while left:
            batch = left[:BATCH]
            for result in _run(batch, [programs[trial] for trial in batch], ddp_class, limit_s):
                left.remove(result.trial)
                if result.failed and len(batch) > 1:
                    yield _again(result, ddp_class, limit_s)
                else:
                    yield result


def _again(result: Result, ddp_class: type, limit_s: float) -> Result:
    """Repeat the trial in its own processes: a failure that recurs there is easier to debug."""
    alone = next(iter(_run([result.trial], [result.program], ddp_class, limit_s)))
    if alone.failed:
        return alone
    return Result(result.trial, result.program, result.difference, None, alone=False)


def _run(trials: Sequence[int], programs: Sequence[Program], ddp_class: type, limit_s: float) -> list[Result]:
    """The results of the trials up to the first with a difference."""
    world_size = programs[0].world_size
    marks = torch.full((world_size, 3), -1).share_memory_()
    limits = {"timeout": limit_s, "straggler_s": STRAGGLER_S, "group_timeout_s": AGREEMENT_TIMEOUT_S}
    outcomes = run_outcomes(run_batch, world_size, programs, ddp_class, marks, **limits)
    if all(outcome.ok for outcome in outcomes):
        columns = zip(*(outcome.value for outcome in outcomes), strict=True)
        firsts = [_earliest(program, column) for program, column in zip(programs, columns, strict=False)]
    else:
        # The earliest trial that a rank was in: all ranks had finished those before it.
        at = max(0, int(marks[:, 0].min()))
        firsts = [None] * at + [_ended(outcomes, marks, programs[at])]
    return [
        Result(trial, program, first, reason_for(program, first) if first else None)
        for trial, program, first in zip(trials, programs, firsts, strict=False)
    ]


def _earliest(program: Program, differences: Sequence[Difference | None]) -> Difference | None:
    """The difference found in the earliest step; among several, an intended one, because it may cause the others."""
    found = [difference for difference in differences if difference is not None]
    return min(found, key=lambda d: (d.step, reason_for(program, d) is None), default=None)


def _ended(outcomes: Sequence[Outcome], marks: torch.Tensor, program: Program) -> Difference:
    """The difference for ranks that died, hung or raised unexpectedly; the rank that ended first is the cause."""
    bad = sorted(
        (outcome for outcome in outcomes if not outcome.ok),
        key=lambda outcome: float("inf") if outcome.finished_s is None else outcome.finished_s,
    )
    rank = bad[0].rank
    number, side = int(marks[rank, 1]), int(marks[rank, 2])
    operations = [(step, op) for step, ops in enumerate(((Do("make"),), *program.steps), -1) for op in ops]
    step, op = operations[number] if 0 <= number < len(operations) else (-1, "the start")
    ends = "\n".join(f"rank {o.rank} (exit code {o.exit_code}): {_shortened(o.error or '')}" for o in bad)
    if side == 0:
        return Difference(rank, step, repr(op), ENDED_ITSELF, "", ends, "was not asked")
    return Difference(rank, step, repr(op), "end", "of the process", "goes on", ends)


def _shortened(error: str) -> str:
    text = re.sub(r"\n{2,}", "\n", error)
    return text if len(text) <= 3000 else f"{text[:1000]}\n...\n{text[-2000:]}"
