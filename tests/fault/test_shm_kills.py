"""Ranks that share memory are killed at random instants: the others name the rank, and nothing is left."""

import dataclasses
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import torchddp
from benchmarks.chaos.job import NUMELS, Stamped, deviation, gradients, make_optimizer, simulate
from benchmarks.chaos.leaks import holders_of, segments_of, shared_files
from tests.harness import run_outcomes
from torchddp.ddp import session
from torchddp.ddp.states import send_states
from torchddp.optim import OSS

STEPS = 3
PHASES = ("construction", "buffers", "forward", "hook", "optimizer")

pytestmark = [pytest.mark.beyond_torch("names neither the rank nor the bucket"), pytest.mark.slow]


@dataclasses.dataclass
class Kill:
    seed: int
    world_size: int
    victim: int
    phase: str
    step: int
    gradient: int  # for "hook": the gradient that is ready
    delay_s: float

    def at(self, phase: str, gradient: int | None = None) -> bool:
        return phase == self.phase and gradient in (None, self.gradient)


def kill(seed: int) -> Kill:
    chance = random.Random(seed)
    world_size = (2, 2, 3, 4)[seed % 4]
    # At once, a moment later, or much later in another phase.
    delay_us = chance.choice([1, 10 ** chance.uniform(0, 2.5), 10 ** chance.uniform(2.5, 4)])
    return Kill(
        seed, world_size, chance.randrange(world_size), PHASES[seed // 4 % len(PHASES)], chance.randrange(STEPS),
        chance.randrange(len(NUMELS)), delay_us / 1e6,
    )  # fmt: skip


def die_in(seconds: float, log: Path) -> None:
    """Let the kernel kill the process at that time, wherever it is; write the time of death to `log`."""
    log.write_text(str(time.monotonic() + seconds))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def train(rank: int, ddp_class: type, plan: Kill, folder: Path, sharded: bool) -> dict:
    """Train; return the number of correct steps, the error and its time, and the mapped segments."""
    seen = {"steps": 0, "types": [], "text": "", "time_s": 0.0, "segments": set()}

    def visit(phase: str, gradient: int | None = None) -> None:
        if rank == plan.victim and seen["steps"] == plan.step and plan.at(phase, gradient):
            die_in(plan.delay_s, folder / "death")

    def watched(*arguments):
        seen["segments"] |= segments_of()
        if rank == plan.victim and plan.at("construction"):
            die_in(plan.delay_s, folder / "death")
        return send_states(*arguments)

    session.send_states = watched  # only in this rank's process
    model = Stamped(False, visit)
    model.register_buffer("counted", torch.zeros(500))
    expected = simulate(range(plan.world_size), STEPS)
    try:
        if sharded:
            optimizer = OSS(model.parameters(), torch.optim.SGD, lr=make_optimizer(model.parameters()).defaults["lr"])
            ddp = torchddp.ShardedDataParallel(model, optimizer, reduce_buffer_size=250, transport="shm")
        else:
            ddp = ddp_class(model, bucket_cap_mb=0.001, transport="shm")
            optimizer = make_optimizer(model.parameters())
        for step in range(STEPS):
            visit("buffers")
            loss = ddp(rank, step)
            assert model.counted[0].item() == step
            model.counted += 1
            optimizer.zero_grad()
            loss.backward()
            owned = [not sharded or optimizer.param_to_rank[p] == rank for p in model.parameters()]
            got = [grad for grad, mine in zip(gradients(model), owned, strict=True) if mine or grad is not None]
            assert deviation(got, [grad for grad, mine in zip(expected[step], owned, strict=True) if mine]) < 1e-5
            visit("optimizer")
            seen["steps"] += 1
            optimizer.step()
        if rank == plan.victim:
            time.sleep(1)  # the longest delay
    except RuntimeError as error:
        seen.update(types=[c.__name__ for c in type(error).__mro__], text=str(error), time_s=time.monotonic())
    return seen


def run(ddp_class: type, plan: Kill, folder: Path, sharded: bool) -> tuple[list[str], set[str]]:
    """Run the plan; return failures and the segments that were mapped."""
    survivors = [rank for rank in range(plan.world_size) if rank != plan.victim]
    (folder / "death").unlink(missing_ok=True)
    outcomes = run_outcomes(train, plan.world_size, ddp_class, plan, folder, sharded, needed_ranks=survivors)
    wrong = []
    segments: set[str] = set()
    for rank in survivors:
        seen = outcomes[rank].value
        if not outcomes[rank].ok:
            wrong.append(f"{plan}: rank {rank}: {outcomes[rank].error}")
            continue
        segments |= seen["segments"]
        if seen["steps"] == STEPS and not seen["types"]:
            continue  # it needed nothing more from the dead rank
        late_s = seen["time_s"] - float((folder / "death").read_text())
        named = "TransportError" in seen["types"] and re.search(rf"rank {plan.victim}\b", seen["text"])
        if not named or late_s < 0:
            wrong.append(f"{plan}: rank {rank} after {late_s:.1f} s: {seen['types']}: {seen['text']}")
    return wrong, segments


@pytest.mark.rest_is_thorough("*-first")
@pytest.mark.parametrize(
    ("sharded", "first", "kills"),
    [
        pytest.param(False, 0, 40, id="ddp-first"),
        pytest.param(False, 40, 60, id="ddp"),
        pytest.param(True, 1000, 15, id="sharded-first"),
        pytest.param(True, 1015, 25, id="sharded"),
    ],
)
def test_survivors_name_the_dead_and_leave_nothing(ddp_class, sharded, first, kills, tmp_path):
    files = shared_files()
    failures, segments = [], set()
    for seed in range(first, first + kills):
        wrong, mapped = run(ddp_class, kill(seed), tmp_path, sharded)
        failures += wrong
        segments |= mapped
        assert len(failures) < 5, "\n".join(failures)
    assert not failures, "\n".join(failures)
    assert len(segments) > 2 * kills * (not sharded) and not holders_of(segments)
    assert shared_files() == files
