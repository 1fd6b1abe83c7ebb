"""Runs programs on ranks, several in a row on the same processes: each line with torch's class, then with the other."""

import gc
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.fuzz.compare import Difference, Raised, exceptions_differ, first_difference
from tests.fuzz.model import hash_of
from tests.fuzz.program import Program
from tests.fuzz.side import Side
from tests.fuzz.wanted import ENDED_ITSELF, reason_for, strictness_for
from tests.harness import Outcome, keep_alive, run_outcomes

# If an error ends only one rank, the others wait for it this long in each class, and the finished rank waits for them:
# in ours while they still wait in torch's.
GROUP_TIMEOUTS_S = 10.0, 20.0
AGREEMENT_TIMEOUT_S = 80.0
BATCH = 8
TRIAL_LIMIT_S = 90.0
STRAGGLER_S = 6.0
Mark = Callable[[int, int], None]  # (line, side): where this rank is


@dataclass(frozen=True)
class Result:
    trial: int
    program: Program
    difference: Difference | None = None
    wanted: str | None = None  # why this difference is intended

    @property
    def failed(self) -> bool:
        return self.difference is not None and self.wanted is None

    def text(self) -> str:
        assert self.difference is not None
        return f"trial {self.trial}: {self.difference.text()}\n{self.program.text()}"


def run_trials(programs: dict[int, Program], ddp_class: type, limit_s: float = TRIAL_LIMIT_S) -> Iterator[Result]:
    """A result for each trial as it finishes; trials are grouped by world size, so not in order."""
    for world_size in sorted({program.world_size for program in programs.values()}):
        left = [trial for trial, program in programs.items() if program.world_size == world_size]
        while left:
            batch = left[:BATCH]
            for result in _run(batch, [programs[trial] for trial in batch], ddp_class, limit_s):
                left.remove(result.trial)
                yield result


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


def _ended(outcomes: Sequence[Outcome], marks: Tensor, program: Program) -> Difference:
    """The difference for ranks that died, hung or raised unexpectedly; the rank that ended first is the cause."""
    bad = sorted(
        (outcome for outcome in outcomes if not outcome.ok),
        key=lambda outcome: float("inf") if outcome.finished_s is None else outcome.finished_s,
    )
    rank = bad[0].rank
    number, side = int(marks[rank, 1]), int(marks[rank, 2])
    lines = list(numbered(program))
    step, line = lines[number] if 0 <= number < len(lines) else (-1, "the start")
    ends = "\n".join(f"rank {o.rank} (exit code {o.exit_code}): {_shortened(o.error or '')}" for o in bad)
    if side == 0:
        return Difference(rank, step, line, ENDED_ITSELF, "", ends, "was not asked")
    return Difference(rank, step, line, "end", "of the process", "goes on", ends)


def _shortened(error: str) -> str:
    text = re.sub(r"\n{2,}", "\n", error)
    return text if len(text) <= 3000 else f"{text[:1000]}\n...\n{text[-2000:]}"


def numbered(program: Program) -> Iterator[tuple[int, str]]:
    """All lines with their step."""
    yield -1, "make()"
    for step, lines in enumerate(program.steps):
        yield from ((step, line) for line in lines)


# --- on a rank ---


def run_batch(rank: int, programs: Sequence[Program], ddp_class: type, marks: Tensor) -> list[Difference | None]:
    """The first difference of each program, in order, up to the first program with a difference."""
    gc.freeze()  # keep objects from before the fork out of each collection
    os.environ["TORCHDDP_STALL_REPORT_S"] = "0"  # torch's class may leave ranks waiting
    outcomes = []
    for trial, program in enumerate(programs):

        def mark(number: int, side: int, trial: int = trial) -> None:
            marks[rank] = torch.tensor([trial, number, side])

        outcomes.append(run_program(rank, program, ddp_class, mark))
        if agree(outcomes[-1] is not None):
            break
    return outcomes


def run_program(rank: int, program: Program, ddp_class: type, mark: Mark) -> Difference | None:
    classes = TorchDDP, ddp_class
    backends = zip(("gloo", program.backend), GROUP_TIMEOUTS_S, strict=True)
    groups = [dist.new_group(backend=name, timeout=timedelta(seconds=limit_s)) for name, limit_s in backends]
    sides = [Side(program, c, rank, group) for c, group in zip(classes, groups, strict=True)]
    try:
        return _compare_all(rank, program, sides, mark)
    finally:
        # Free models first: otherwise torch's reducer ends its group's threads from its own destructor.
        sides.clear()
        gc.collect()
        for group in groups:
            # A hook's closure holds the group until its collectives complete, also after a failed step. Dropping the
            # last reference in one of the group's own threads would abort the process.
            keep_alive(group)
            dist.destroy_process_group(group)


def _compare_all(rank: int, program: Program, sides: list[Side], mark: Mark) -> Difference | None:
    lines = list(numbered(program))
    for number, (step, line) in enumerate(lines):
        raised, ends = [], []
        for i, side in enumerate(sides):
            mark(number, i)
            torch.manual_seed(hash_of(program.key, rank, number))
            raised.append(attempt(side, line, step))
            ends.append(torch.get_rng_state())
        difference = _compare(rank, step, line, sides, raised, ends)
        ended = difference is not None or raised[0] is not None
        # As in real programs, ranks don't wait for each other after other lines.
        together = "loss(" in line or number + 1 == len(lines) or lines[number + 1][0] != step
        if (together and agree(ended)) or (ended and agree(True)):
            return difference
    return None


def _compare(
    rank: int, step: int, line: str, sides: list[Side], raised: list[Raised | None], ends: list[Tensor]
) -> Difference | None:
    def at(*words: str) -> Difference:
        return Difference(rank, step, line, *words)

    if exceptions_differ(*raised):
        ours = f"{raised[1]}\n{raised[1].traceback}" if raised[1] is not None else "goes on"
        return at("exception", "", str(raised[0] or "goes on"), ours)
    strictness = strictness_for(sides[0].program)
    if raised[0] is not None or not strictness.values:
        return None
    found = first_difference(sides[0].visible(), sides[1].visible(), strictness)
    for side in sides:
        side.seen.clear()
    if found is not None:
        return at(*found)
    if not torch.equal(*ends):
        return at("random state", "of the CPU's generator", "has drawn other numbers", "has not drawn the same")
    return None


def attempt(side: Side, line: str, step: int) -> Raised | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            side.run(line, step)
            return None
        except Exception as error:
            types = tuple(f"{t.__module__}.{t.__qualname__}" for t in type(error).__mro__ if t is not object)
            return Raised(types, str(error), traceback.format_exc())


def agree(here: bool) -> bool:
    """Whether `here` is true on any rank (collective)."""
    flag = torch.tensor([float(here)])
    dist.all_reduce(flag)
    return bool(flag.item())
