"""Random programs whose ranks call collectives that do not fit together, and the ranks that run them."""

from __future__ import annotations

import contextlib
import inspect
import logging
import multiprocessing
import os
import random
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import torchddp
from torchddp.diagnose import diagnosis

STALL_S = 1.5  # on a busy machine, gloo's first connections take half a second
LIMIT_S = 40.0
GROUP_TIMEOUT_S = 60.0

# What a program writes for each function. `t`: a tensor of this rank; `n`: the group's size; `root`: its first rank.
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
# In these every rank waits for every other one: whoever is in one while another rank is elsewhere stays there. Those
# of one line are the same to gloo, which ends the process where sizes differ.
SYMMETRIC = (
    ("all_reduce",),
    ("barrier",),
    ("all_gather", "all_gather_into_tensor", "all_gather_object"),
)
BY_NAME = ("all_reduce", "barrier")  # imported before torchddp watches
# Over torchddp_shm ranks that are out of step raise at once: there these hang that meet in no message.
MEET_NOWHERE = ("missing", "other group", "receives", "new group")
KINDS = ("other function", "one more", "once again", "asynchronous", *MEET_NOWHERE)


@dataclass(frozen=True)
class HangingProgram:
    """One program, and how many ranks of which backend run it."""

    seed: int
    kind: str
    backend: str
    world_size: int
    source: str


def draw(seed: int) -> HangingProgram:
    """The program of this seed. Its kinds take turns."""
    dice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    backend = dice.choice(["gloo", "torchddp_shm"]) if kind in MEET_NOWHERE else "gloo"
    world_size = dice.randint(3 if kind == "other group" else 2, 4)
    culprit = dice.randrange(world_size)
    lines = _Lines()
    inner = sorted(dice.sample(range(world_size), dice.randint(2, world_size)))
    if kind == "other group":
        others = [rank for rank in range(world_size) if rank != culprit]
        inner = sorted([culprit, dice.choice(others)])
    lines.add(f"inner = dist.new_group({inner})")
    common = [name for name in CALLS if name not in ("recv", "new_group")]
    for _ in range(dice.randint(0, 4)):  # what fits together
        on_inner = dice.random() < 0.4
        lines.add(f"if rank in {inner if on_inner else list(range(world_size))}:")
        lines.call(dice, dice.choice(common), "inner" if on_inner else "None", inner if on_inner else range(world_size))
    first, second = (dice.choice(alike) for alike in dice.sample(SYMMETRIC, 2))
    again = first if first != "barrier" else second
    everybody = range(world_size)
    lines.add(f"if rank == {culprit}:")
    if kind == "other function":
        lines.call(dice, second, "None", everybody)
    elif kind == "missing":
        lines.add("    enter(''); time.sleep(1000)")
    elif kind == "one more":
        lines.call(dice, second, "None", everybody)
        lines.call(dice, first, "None", everybody)
    elif kind == "other group":
        lines.call(dice, first, "inner", inner)
    elif kind == "once again":  # where the others are at the barrier, another line
        lines.call(dice, again, "None", everybody, numel=3)
        lines.call(dice, again, "None", everybody, numel=3)
    elif kind == "asynchronous":
        started = "all_reduce" if first == "barrier" else "barrier"
        lines.add(f"    work = dist.{started}({'torch.ones(3), ' if started == 'all_reduce' else ''}async_op=True)")
        lines.waits(started)
    elif kind == "receives":
        peer = dice.choice([rank for rank in everybody if rank != culprit])
        lines.add(f"    peer = {peer}")
        lines.call(dice, "recv", "None", everybody)
    else:
        lines.call(dice, "new_group", "None", everybody)
    lines.add("else:")
    lines.call(dice, again if kind == "once again" else first, "None", everybody, numel=3)
    lines.add("enter('barrier'); dist.barrier(); leave()")
    return HangingProgram(seed, kind, backend, world_size, "\n".join(lines.text) + "\n")


class _Lines:
    def __init__(self) -> None:
        self.text = ["# enter() notes where the rank is: the truth that a report is held against"]

    def add(self, line: str) -> None:
        self.text.append(line)

    def call(self, dice: random.Random, name: str, group: str, ranks: range | list[int], numel: int = 0) -> None:
        for _ in range(dice.randint(0, 2)):
            self.add("    rank += 0")
        call = CALLS[name]
        if name in BY_NAME and dice.random() < 0.5:
            call = call.removeprefix("dist.")
        self.add(f"    g, n, root, t = {group}, {len(ranks)}, {ranks[0]}, torch.ones({numel or dice.randint(1, 5)})")
        self.add(f"    enter({name!r}); {call}; leave()")

    def waits(self, name: str) -> None:
        self.add(f"    enter({name!r}, {len(self.text)}); work.wait(); leave()")


# --- running ---


@dataclass(frozen=True)
class Place:
    """Where a rank is: in this call, at this line; '' if in none."""

    function: str
    line: int


@dataclass(frozen=True)
class Ended:
    """What has come of a program: all reports, and where ranks were when there was one."""

    reports: list[str]
    places: list[Place]
    errors: list[str]


def run(program: HangingProgram, folder: Path) -> Ended:
    """Until there is a report, and a moment longer; then all ranks are killed."""
    path = folder / f"program{program.seed}.py"
    path.write_text(program.source)
    context = multiprocessing.get_context("fork")
    lines = context.Array("i", 2 * program.world_size)
    ranks = [
        context.Process(target=_rank, args=(program, rank, path, lines), daemon=True)
        for rank in range(program.world_size)
    ]
    for process in ranks:
        process.start()
    try:
        until_s = time.monotonic() + LIMIT_S
        while not list(folder.glob("*.report")) and time.monotonic() < until_s:
            if not any(process.is_alive() for process in ranks):
                break
            time.sleep(0.02)
        time.sleep(STALL_S / 2)
        names = [*CALLS, ""]
        places = [Place(names[lines[2 * rank]], lines[2 * rank + 1]) for rank in range(program.world_size)]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    texts = [found.read_text() for found in sorted(folder.glob("*.report"))]
    return Ended(texts, places, [found.read_text() for found in sorted(folder.glob("*.error"))])


def _rank(program: HangingProgram, rank: int, path: Path, lines) -> None:
    os.environ[diagnosis.FOLDER_ENV] = str(path.parent)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    names = [*CALLS, ""]

    class Writer(logging.Handler):
        def emit(self, record):
            (path.parent / f"{rank}-{time.monotonic_ns()}.report").write_text(record.getMessage())

    logging.getLogger("torchddp.hang").addHandler(Writer())

    def enter(name, line=0):
        at = line or inspect.currentframe().f_back.f_lineno
        lines[2 * rank], lines[2 * rank + 1] = names.index(name), at

    def leave():
        lines[2 * rank], lines[2 * rank + 1] = names.index(""), 0

    try:
        leave()
        from torch.distributed import all_reduce, barrier

        torchddp.watch_collectives(stall_report_s=STALL_S)
        store = dist.FileStore(str(path.parent / "store"), program.world_size)
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group(program.backend, store=store, rank=rank, world_size=program.world_size, timeout=timeout)
        found = {
            "dist": dist, "torch": torch, "time": time, "rank": rank, "enter": enter, "leave": leave,
            "all_reduce": all_reduce, "barrier": barrier,
        }  # fmt: skip
        exec(compile(program.source, str(path), "exec"), found)
    except BaseException as error:
        (path.parent / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
    with contextlib.suppress(BaseException):
        time.sleep(LIMIT_S)


# --- what a report says ---

_CLAUSE = re.compile(
    r"ranks? (?P<ranks>[\d, and-]+?) (?:waits? )?(?:in (?P<function>\w+)[^:;]*?|is )at (?P<file>[\w.]+):(?P<line>\d+)"
)


def named_in(headline: str) -> dict[int, tuple[str, str, int]]:
    """By rank the function ('' if it is in none), file and line that a headline names."""
    found: dict[int, tuple[str, str, int]] = {}
    for clause in _CLAUSE.finditer(headline.partition(": they differ")[0]):
        for part in re.findall(r"\d+(?:-\d+)?", clause["ranks"]):
            begin, _, end = part.partition("-")
            for rank in range(int(begin), int(end or begin) + 1):
                found[rank] = (clause["function"] or "", clause["file"], int(clause["line"]))
    return found
