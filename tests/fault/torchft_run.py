"""One run: two replicas at full speed, one killed mid-training, restarted and healed; both must end equal."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fault.torchft_processes import Child, lighthouse

# Kinds of models: gradients in buckets, compressed buckets, one all-reduce per parameter.
KINDS = ("buckets", "powersgd", "pure")

_TOGETHER = 20  # minimum number of steps that both commit before the kill, and again after it
_DEATH_S = 10.0  # for the victim to die


@dataclass
class Run:
    """The outcome of a run. Times in seconds."""

    seed: int
    phase: str = ""  # when the victim was killed: in "backward", or at "any" point
    killed_at_step: int = -1
    resumed_s: float = -1.0  # from the kill to the survivor's next committed step
    healed_s: float = -1.0  # from the kill to the first step that both commit
    discarded: int = 0  # steps that the survivor did not commit
    steps: int = -1
    checksums: tuple[str, ...] = ()
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Both ended at the same step with the same weights."""
        return not self.problem and len(self.checksums) == 2 and len(set(self.checksums)) == 1

    def as_dict(self) -> dict[str, Any]:
        """The outcome as JSON."""
        return {**asdict(self), "ok": self.ok}


def run_once(seed: int, logs: Path, *, kind: str = "buckets", limit_s: float = 180.0) -> Run:
    """Never raises for failures of replicas: they are recorded in ``problem``. Their stderr goes to ``logs``."""
    logs.mkdir(parents=True, exist_ok=True)
    run = Run(seed)
    with (logs / f"run{seed}.log").open("w") as log, contextlib.ExitStack() as stack:

        def start(name: str, die_after: int = -1) -> Child:
            command = [sys.executable, "-m", "tests.fault.torchft_replica", name, "--die-after", str(die_after)]
            command += ["--kind", kind]
            child = Child(command, {"TORCHFT_LIGHTHOUSE": address, "RUST_LOG": "error"}, log)
            stack.callback(child.kill)
            return child

        try:
            address = stack.enter_context(lighthouse(log))
            _play(run, start, random.Random(seed), time.monotonic() + limit_s)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            run.problem = str(error)
    return run


def _play(run: Run, start: Any, rng: random.Random, deadline_s: float) -> None:
    run.phase = "backward" if rng.random() < 0.5 else "any"
    steps = _TOGETHER + rng.randrange(20)
    survivor = start("replica_0")
    victim = start("replica_1", steps if run.phase == "backward" else -1)
    run.killed_at_step = _step_of(_until_together(victim, steps, deadline_s))
    if run.phase == "any":
        time.sleep(rng.random() * 0.02)  # at any point of a step
        victim.kill()
    victim.process.wait(_DEATH_S)
    killed_s = time.monotonic()
    reborn = start("replica_1")
    run.discarded, run.resumed_s = _until_goes_on(survivor, run.killed_at_step, killed_s, deadline_s)
    _until_together(reborn, 1, deadline_s)
    run.healed_s = time.monotonic() - killed_s
    last = _until_together(reborn, _TOGETHER, deadline_s)
    run.steps = _step_of(last) + 400  # further than either can be by now
    for child in (survivor, reborn):
        child.tell(f"stop {run.steps}")
    run.checksums = tuple(_until_done(child, run.steps, deadline_s) for child in (survivor, reborn))
    for child in (survivor, reborn):
        child.end()
    if len(set(run.checksums)) != 1:
        run.problem = "the weights differ"


def _next(child: Child, who: str, deadline_s: float) -> list[str]:
    try:
        return child.next_line(deadline_s)
    except RuntimeError as error:
        raise RuntimeError(f"the {who} {error}") from None


def _step_of(words: list[str]) -> int:
    return int(words[1])


def _until_together(child: Child, steps: int, deadline_s: float) -> list[str]:
    """Waits until it has committed `steps` steps together with another; returns the last one's line."""
    count = 0
    while True:
        words = _next(child, "replica", deadline_s)
        count += int(words[2]) >= 2 and int(words[3])
        if count >= steps:
            return words


def _until_goes_on(survivor: Child, killed_at: int, killed_s: float, deadline_s: float) -> tuple[int, float]:
    """The number of discarded steps, and the seconds until it committed one without the dead replica."""
    discarded = 0
    while True:
        words = _next(survivor, "survivor", deadline_s)
        if _step_of(words) < killed_at:
            continue
        committed = int(words[3])
        discarded += 1 - committed
        if committed and (discarded or int(words[2]) == 1):
            return discarded, time.monotonic() - killed_s


def _until_done(child: Child, steps: int, deadline_s: float) -> str:
    while True:
        words = _next(child, "replica", deadline_s)
        if words[0] == "done":
            if _step_of(words) != steps:
                raise RuntimeError(f"a replica stopped at step {words[1]}, not {steps}")
            return words[2]
