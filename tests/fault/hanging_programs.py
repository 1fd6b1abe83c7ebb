"""Random programs whose ranks call mismatched collectives, and the ranks that run them."""

import inspect
import logging
import os
import pickle
import random
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

import torchddp
from tests.harness import run_ranks
from tests.programs import python
from tests.unit.helpers import wait_until
from torchddp import Checks
from torchddp.diagnose import diagnosis

STALL_S = 1.5  # on a busy machine, gloo's first connections take half a second
LIMIT_S = 120.0
GROUP_TIMEOUT_S = 300.0

# The call of each function. `t`: a tensor of this rank; `n`: the group's size; `root`: its first rank.
CALLS = {
    "all_reduce": "dist.all_reduce(t, group=g)",
    "broadcast": "dist.broadcast(t, root, group=g)",
    "reduce": "dist.reduce(t, root, group=g)",
    "barrier": "dist.barrier(group=g)",
    "all_gather": "dist.all_gather([t.clone() for _ in range(n)], t, group=g)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(t.repeat(n), t, group=g)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(t, t.repeat(n), group=g)",
    "gather": "dist.gather(t, [t.clone() for _ in range(n)] if rank == root else None, root, group=g)",
    "scatter": "dist.scatter(t, [t.clone() for _ in range(n)] if rank == root else None, root, group=g)",
    "all_to_all_single": "dist.all_to_all_single(t.repeat(n), t.repeat(n), group=g)",
    "all_gather_object": "dist.all_gather_object([None] * n, {'rank': rank}, group=g)",
    "broadcast_object_list": "dist.broadcast_object_list([rank], root, group=g)",
    "gather_object": "dist.gather_object(rank, [None] * n if rank == root else None, root, group=g)",
    "new_group": "dist.new_group([0, 1])",
    "recv": "dist.recv(t, peer, group=g)",
}
# In these every rank waits for all others, so a rank hangs in one if another rank doesn't call it. gloo can't
# distinguish those in the same line, and aborts the process if their sizes differ.
SYMMETRIC = (
    ("all_reduce",),
    ("barrier",),
    ("all_gather", "all_gather_into_tensor", "all_gather_object"),
)
BY_NAME = ("all_reduce", "barrier")  # also called as imported names
# torchddp_shm raises at once if collectives mismatch; only these kinds, which exchange no message, hang.
MEET_NOWHERE = ("missing", "other group", "receives", "new group")
_FUNCTIONAL = "(lambda x: functional.all_reduce(x, 'sum', dist.group.WORLD) * 2)"
# The others' calls have no frame of torch.distributed while ranks wait for them.
BEGUN_EARLIER = {
    "awaited": "work = dist.all_reduce(t, async_op=True); work.wait()",
    "functional": f"{_FUNCTIONAL}(t).sum().item()",
    "compiled": f"torch.compile({_FUNCTIONAL}, backend='aot_eager')(t)",
}
KINDS = ("other function", "one more", "once again", "asynchronous", *MEET_NOWHERE, *BEGUN_EARLIER)


@dataclass(frozen=True)
class HangingProgram:
    """A program, its backend and its number of ranks."""

    seed: int
    backend: str
    world_size: int
    source: str


def draw(seed: int, kind: str, world_size: int, culprit: int) -> HangingProgram:
    """The program of this seed, in which one rank does what the kind says."""
    dice = random.Random(seed)
    backend = dice.choice(["gloo", "torchddp_shm"]) if kind in MEET_NOWHERE else "gloo"
    everybody = list(range(world_size))
    peer = dice.choice([rank for rank in everybody if rank != culprit])
    inner = sorted(dice.sample(everybody, dice.randint(2, world_size)))
    if kind == "other group":
        inner = sorted([culprit, peer])
    lines = ["# enter() notes where the rank is: what a report must say", f"inner = dist.new_group({inner})"]

    def add(name: str, group: str = "None", ranks: list[int] = everybody, numel: int = 0) -> None:
        call = CALLS[name]
        if name in BY_NAME and dice.random() < 0.5:
            call = call.removeprefix("dist.")
        lines.extend(["    rank += 0"] * dice.randint(0, 2))
        size = numel or dice.randint(1, 5)
        lines.append(f"    g, n, root, t, peer = {group}, {len(ranks)}, {ranks[0]}, torch.ones({size}), {peer}")
        lines.append(f"    enter({name!r}); {call}; leave()")

    for _ in range(dice.randint(0, 4)):  # matching calls
        group, ranks = ("inner", inner) if dice.random() < 0.4 else ("None", everybody)
        lines.append(f"if rank in {ranks}:")
        add(dice.choice([name for name in CALLS if name not in ("recv", "new_group")]), group, ranks)
    first, second = (dice.choice(alike) for alike in dice.sample(SYMMETRIC, 2))
    if kind == "once again" and first == "barrier":  # the other ranks' barrier must be in another line
        first, second = second, first
    started = "all_reduce" if first == "barrier" else "barrier"
    lines.append(f"if rank == {culprit}:")
    if kind in ("missing", *BEGUN_EARLIER):
        lines.append("    enter(''); time.sleep(1000)")
    elif kind == "asynchronous":
        tensor = "torch.ones(3), " if started == "all_reduce" else ""
        lines.append(f"    enter({started!r}); work = dist.{started}({tensor}async_op=True); work.wait(); leave()")
    elif kind == "other group":
        add(first, "inner", inner)
    else:
        calls = {"other function": [second], "one more": [second, first], "once again": [first, first]}
        for name in calls.get(kind, ["recv" if kind == "receives" else "new_group"]):
            add(name, numel=3)
    lines.append("else:")
    if kind in BEGUN_EARLIER:
        lines.append(f"    t = torch.ones(3); enter('all_reduce'); {BEGUN_EARLIER[kind]}; leave()")
    else:
        add(first, numel=3)
    lines.append("enter('barrier'); dist.barrier(); leave()")
    return HangingProgram(seed, backend, world_size, "\n".join(lines) + "\n")


# --- running ---


NAMES = [*CALLS, ""]


def run(program: HangingProgram, folder: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """All reports, and each rank's function ('' if in none) and line at the time of the report.

    An extra rank waits for the first report and a moment longer; then the others are killed.
    """
    path = folder / f"program{program.seed}.py"
    path.write_text(program.source)
    places = torch.zeros(program.world_size, 2, dtype=torch.int64).share_memory_()

    def work(rank: int) -> Any:
        if rank < program.world_size:
            return _rank(program, rank, path, places)
        dist.destroy_process_group()
        wait_until(lambda: list(folder.glob("*.report")), LIMIT_S)
        time.sleep(STALL_S / 2)
        return places.tolist()

    found = run_ranks(work, program.world_size + 1, needed_ranks=[program.world_size])[-1]
    reports = [report.read_text() for report in folder.glob("*.report")]
    return reports, [(NAMES[name], line) for name, line in found]


def _rank(program: HangingProgram, rank: int, path: Path, places: torch.Tensor) -> None:
    os.environ[diagnosis.FOLDER_ENV] = str(path.parent)

    class Writer(logging.Handler):
        def emit(self, record):
            (path.parent / f"{rank}-{time.monotonic_ns()}.report").write_text(record.getMessage())

    logging.getLogger("torchddp.hang").addHandler(Writer())

    def enter(name):
        places[rank] = torch.tensor([NAMES.index(name), inspect.currentframe().f_back.f_lineno])

    def leave():
        places[rank] = torch.tensor([NAMES.index(""), 0])

    leave()
    dist.destroy_process_group()
    from torch.distributed import all_reduce, barrier

    store = dist.FileStore(str(path.parent / "store"), program.world_size)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(program.backend, store=store, rank=rank, world_size=program.world_size, timeout=timeout)
    model = torchddp.DDP(torch.nn.Linear(1, 1), checks=Checks(stall_report=STALL_S))
    found = {
        "model": model, "dist": dist, "torch": torch, "time": time, "rank": rank, "enter": enter, "leave": leave,
        "functional": _functional_collectives, "all_reduce": all_reduce, "barrier": barrier,
    }  # fmt: skip
    exec(compile(program.source, str(path), "exec"), found)


# --- parsing a report ---

_CLAUSE = re.compile(
    r"ranks? (?P<ranks>[\d, and-]+?) (?:waits? in (?P<function>\w+)|is|are) at (?P<file>[\w.]+):(?P<line>\d+)"
)


def named_in(headline: str) -> dict[int, tuple[str, str, int]]:
    """Each rank's function ('' if in none), file and line from a report's headline."""
    found: dict[int, tuple[str, str, int]] = {}
    for clause in _CLAUSE.finditer(headline):
        for part in re.findall(r"\d+(?:-\d+)?", clause["ranks"]):
            begin, _, end = part.partition("-")
            for rank in range(int(begin), int(end or begin) + 1):
                found[rank] = (clause["function"] or "", clause["file"], int(clause["line"]))
    return found


def named_by_torch(folder: Path) -> tuple[set[int], str]:
    """The ranks that torchfrtrace misses, or else blames, where most ranks wait; and its text."""
    if torch.__version__ < (2, 12):
        pytest.skip("torchfrtrace of torch < 2.12 knows neither gloo nor barriers")
    done = python("-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-o", str(folder / "found"))
    with open(folder / "found", "rb") as file:
        _, found = pickle.load(file)
    failed = [each for each in found.collectives if each.missing_ranks or each.mismatch_collectives]
    waiting = [len(each.expected_ranks - (each.missing_ranks or set())) for each in failed]
    named = [each.missing_ranks or set(each.mismatch_collectives) for each in failed]
    return set().union(
        *(ranks for ranks, number in zip(named, waiting, strict=True) if number == max(waiting))
    ), done.stderr
