"""Plans which faults a run injects, and where, from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KILL, STOP, EXCEPTION, SLOW, SOCKET, FULL = "kill", "stop", "exception", "slow", "socket", "full"
# Deliberate errors, not part of a normal run: the judge must catch them.
CORRUPT, ORPHAN = "corrupt", "orphan"
KINDS = (KILL, STOP, EXCEPTION, SLOW, SOCKET, FULL)
MUTANTS = (CORRUPT, ORPHAN)

SHM, GLOO, TORCHFT = "shm", "gloo", "torchft"
OVER = (SHM, GLOO, TORCHFT)
# Over torchft, the manager's timeouts deal with a stopped rank, and the sockets belong to its process group.
_KINDS_OVER = {SHM: KINDS, GLOO: KINDS[:-1], TORCHFT: (KILL, EXCEPTION, SLOW)}

CONSTRUCTION = "construction"
PHASES = ("forward", "hook", "launch", "backward_end", "optimizer", "between")
WORLD_SIZES = (2, 3, 4)
STEPS = 5
NUM_GRADIENTS = 4
BUCKET_CAPS_MB = (0.0005, 0.01, 0.1, None)
OPTIONS = ("none", "find_unused_parameters", "static_graph", "copies", "own_hook", "torch_hook")
# A hook of torchddp.comm_hooks uses shared memory by itself; over a process group the trial would test both.
_OPTIONS_OVER = {SHM: OPTIONS, GLOO: tuple(option for option in OPTIONS if option != "own_hook"), TORCHFT: OPTIONS[:1]}
# Ways to run out of shared memory: a limit on its size, or on the size of any file.
SHORTAGES = ("shm_limit", "file_size")


@dataclass(frozen=True)
class Trial:
    """A small job and its one fault.

    Attributes:
        number: index in the run; the same seed, kinds, transports and world sizes always give the same trial.
        kind: one of `KINDS`.
        over: one of `OVER`.
        world_size: ranks of the job (replica groups of one rank each over torchft).
        rank: the faulty rank.
        step: the step of the fault, below `STEPS` - 1, so that at least one follows.
        phase: where in the step: "forward"; "hook": the hook of gradient number `gradient` to be ready; "launch": all
            buckets are launched, none is waited for; "backward_end": `backward()` has returned; "optimizer": inside
            `optimizer.step()`; "between" two steps. "construction" for `FULL`, before the model is wrapped.
        gradient: see "hook".
        option: one of `OPTIONS`, of the class under test ("copies": gradient_as_bucket_view=False; "own_hook",
            "torch_hook": a lossless communication hook of torchddp.comm_hooks or of torch).
        bucket_cap_mb: MiB; None is the default.
        shortage: one of `SHORTAGES`, for `FULL`.
    """

    number: int
    kind: str
    over: str
    world_size: int
    rank: int
    step: int
    phase: str
    gradient: int = 0
    option: str = "none"
    bucket_cap_mb: float | None = None
    shortage: str = SHORTAGES[0]

    @property
    def wire(self) -> str:
        """The transport that carries the gradients: the process group with torch's hook or without shared memory."""
        falls_back = self.kind == FULL or self.option == "torch_hook"
        return GLOO if self.over == SHM and falls_back else self.over

    def __str__(self) -> str:
        where = f"step {self.step}, {self.phase}" + (f" of gradient {self.gradient}" if self.phase == "hook" else "")
        return (
            f"trial {self.number}: {self.kind} over {self.over}, rank {self.rank} of {self.world_size}, {where}, "
            f"options: {self.option}, bucket_cap_mb={self.bucket_cap_mb}"
        )


def cells(kinds: Sequence[str], over: Sequence[str]) -> list[tuple[str, str]]:
    """The valid pairs of kind and transport."""
    return [(kind, where) for kind in kinds for where in over if kind in _KINDS_OVER[where] or kind in MUTANTS]


def _options(kind: str, over: str) -> tuple[str, ...]:
    # With a hook the reducer may need no shared memory, so a shortage would go unnoticed.
    return tuple(option for option in _OPTIONS_OVER[over] if kind != FULL or not option.endswith("_hook"))


def make_trial(seed: int, number: int, kind: str, over: str, world_sizes: Sequence[int]) -> Trial:
    """A random trial; the same arguments give the same one."""
    chance = random.Random(f"{seed}/{number}/{kind}/{over}")
    world_size = chance.choice(world_sizes)
    return Trial(
        number,
        kind,
        over,
        world_size,
        rank=chance.randrange(world_size),
        step=chance.randrange(STEPS - 1),
        phase=CONSTRUCTION if kind == FULL else chance.choice(PHASES),
        gradient=chance.randrange(NUM_GRADIENTS),
        option=chance.choice(_options(kind, over)),
        bucket_cap_mb=chance.choice(BUCKET_CAPS_MB),
        shortage=chance.choice(SHORTAGES),
    )


def make_plan(
    trials: int,
    seed: int,
    kinds: Sequence[str] = KINDS,
    over: Sequence[str] = OVER,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> list[Trial]:
    """Trials that cycle through the pairs of kind and transport, otherwise random. ValueError if no pair is valid."""
    pairs = cells(kinds, over)
    if not pairs:
        raise ValueError(f"no trial of {', '.join(kinds)} over {', '.join(over)}")
    return [make_trial(seed, number, *pairs[number % len(pairs)], world_sizes) for number in range(trials)]
