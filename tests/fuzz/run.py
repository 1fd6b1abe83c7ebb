"""Runs programs on one rank: each operation with torch's class, then with the other, then compares them."""

import gc
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.fuzz.compare import Difference, Raised, exceptions_differ, first_difference
from tests.fuzz.model import hash_of
from tests.fuzz.program import Do, Op, Program, Train
from tests.fuzz.side import Side
from tests.fuzz.wanted import strictness_for
from tests.harness import keep_until_exit

# If an error ends only one rank, the others wait for it this long, twice, and the finished rank waits for them.
GROUP_TIMEOUT_S = 10.0
AGREEMENT_TIMEOUT_S = 80.0
SIDES = ("torch's class", "ours")
Mark = Callable[[int, int], None]  # (operation, side): where this rank is


def run_batch(rank: int, programs: Sequence[Program], ddp_class: type, marks: Tensor) -> list[Difference | None]:
    """The first difference of each program, in order, up to the first program with a difference."""
    gc.freeze()  # keep objects from before the fork out of each collection
    os.environ["TORCHDDP_STALL_REPORT_S"] = "0"  # torch's class may leave ranks waiting
    outcomes = []
    for trial, program in enumerate(programs):

        def mark(operation: int, side: int, trial: int = trial) -> None:
            marks[rank] = torch.tensor([trial, operation, side])

        outcomes.append(run_program(rank, program, ddp_class, mark))
        if agree(outcomes[-1] is not None):
            break
    return outcomes


def run_program(rank: int, program: Program, ddp_class: type, mark: Mark) -> Difference | None:
    groups = [dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S)) for _ in SIDES]
    sides = [Side(program, c, rank, group) for c, group in zip((TorchDDP, ddp_class), groups, strict=True)]
    try:
        return _compare_all(rank, program, sides, mark)
    finally:
        # Free models first: otherwise torch's reducer ends its group's threads from its own destructor.
        sides.clear()
        gc.collect()
        for group in groups:
            # A hook's closure holds the group until its collectives complete, also after a failed step. Dropping the
            # last reference in one of the group's own threads would abort the process.
            keep_until_exit(group)
            dist.destroy_process_group(group)


def _compare_all(rank: int, program: Program, sides: list[Side], mark: Mark) -> Difference | None:
    number = 0
    for step, ops in enumerate(((Do("make"),), *program.steps), -1):
        for op in ops:
            raised, ends = [], []
            for i, side in enumerate(sides):
                mark(number, i)
                torch.manual_seed(hash_of(program.key, rank, number))
                raised.append(attempt(side, op, step))
                ends.append(torch.get_rng_state())
            difference = _compare(rank, step, op, sides, raised, ends, program)
            number += 1
            ended = difference is not None or raised[0] is not None
            # As in real programs, ranks don't wait for each other in other operations.
            together = isinstance(op, Train) or op is ops[-1]
            if (together and agree(ended)) or (ended and agree(True)):
                return difference
    return None


def _compare(
    rank: int, step: int, op: Op, sides: list[Side], raised: list[Raised | None], ends: list[Tensor], program: Program
) -> Difference | None:
    def at(*words: str) -> Difference:
        return Difference(rank, step, repr(op), *words)

    if exceptions_differ(*raised):
        ours = f"{raised[1]}\n{raised[1].traceback}" if raised[1] is not None else "goes on"
        return at("exception", "", str(raised[0] or "goes on"), ours)
    strictness = strictness_for(program)
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


def attempt(side: Side, op: Op, step: int) -> Raised | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            side.do(op, step)
            return None
        except Exception as error:
            types = tuple(f"{t.__module__}.{t.__qualname__}" for t in type(error).__mro__ if t is not object)
            return Raised(types, str(error), traceback.format_exc())


def agree(here: bool) -> bool:
    """Whether `here` is true on any rank (collective)."""
    flag = torch.tensor([float(here)])
    dist.all_reduce(flag)
    return bool(flag.item())
