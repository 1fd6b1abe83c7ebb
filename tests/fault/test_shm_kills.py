"""Ranks that share memory are killed at random instants: the others say at once who it was, and nothing is left."""

import dataclasses
import random
import re
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import torchddp
from benchmarks.chaos.leaks import holders_of, segments_of, shared_files
from tests.fault.deaths import die_in
from tests.harness import run_outcomes
from torchddp.ddp import module
from torchddp.ddp.session import ReducerSession
from torchddp.optim import OSS

NUM_KILLS = 200
NUM_SHARDED_KILLS = 40
STEPS = 3
NOTICED_S = 2.0
BUDGET_S = 90.0  # for all of them together
PHASES = ("construction", "buffers", "forward", "backward", "optimizer")
# One travels in the slot of an operation, one is a single chunk, one is many that ranks take from each other.
NUMELS = (50, 5_000, 60_000)

pytestmark = pytest.mark.beyond_torch("names neither the rank nor the bucket")


@dataclasses.dataclass
class Kill:
    seed: int
    world_size: int
    victim: int
    phase: str
    step: int
    param: int  # of backward: at whose gradient
    delay_us: int
    sharded: bool = False


def kill(seed: int) -> Kill:
    chance = random.Random(seed)
    world_size = (2, 2, 3, 4)[seed % 4]
    # Just then, a moment later, or when it is long somewhere else.
    delay_us = chance.choice([0, int(10 ** chance.uniform(0, 2.5)), int(10 ** chance.uniform(2.5, 4))])
    return Kill(
        seed, world_size, chance.randrange(world_size), PHASES[seed // 4 % len(PHASES)], chance.randrange(STEPS),
        chance.randrange(len(NUMELS)), delay_us,
    )  # fmt: skip


def stamp(rank: int, step: int, index: int) -> torch.Tensor:
    return rank + 10 * step + index + torch.arange(NUMELS[index], dtype=torch.float32) % 7


class Stamped(nn.Module):
    """The gradient of parameter i is its stamp; a buffer counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(numel) for numel in NUMELS)
        self.register_buffer("step", torch.zeros(500))
        self.in_forward = self.in_backward = lambda index: None

    def forward(self, rank: int, step: int) -> torch.Tensor:
        self.in_forward(step)
        total = torch.zeros(())
        for index, weight in enumerate(self.weights):
            part = weight * stamp(rank, step, index)
            part.register_hook(lambda grad, index=index: self.in_backward(index))
            total = total + part.sum()
        self.step += 1
        return total


def arm(plan: Kill, model: Stamped, log: Path) -> dict:
    """Puts the kill where the plan says; the rest by name, for the training loop to call."""
    die = lambda *_: die_in(plan.delay_us, log)  # noqa: E731
    at_step = [-1]

    def when(place: str):
        return lambda index=None: die() if (place, at_step[0]) == (plan.phase, plan.step) else None

    model.in_forward = when("forward")
    model.in_backward = lambda index: die() if ("backward", at_step[0], index) == (
        plan.phase, plan.step, plan.param,
    ) else None  # fmt: skip
    return {"step": at_step, "buffers": when("buffers"), "optimizer": when("optimizer")}


def train(rank: int, ddp_class: type, plan: Kill, folder: Path) -> dict:
    """What a rank saw: how many steps were right, the error and its time, the segments it had mapped."""
    calls = {"step": [-1], "buffers": lambda: None, "optimizer": lambda: None}
    model = Stamped()
    log = folder / "death"
    seen = {"steps": 0, "types": [], "text": "", "time_s": 0.0, "segments": set()}

    class Watched(ReducerSession):
        def sync_states(self, transport, src, *, buffers):
            seen["segments"] |= segments_of()
            if rank == plan.victim and plan.phase == "construction":
                die_in(plan.delay_us, log)
            return super().sync_states(transport, src, buffers=buffers)

    module.ReducerSession = Watched  # in this rank's process
    if rank == plan.victim:
        calls = arm(plan, model, log)
    try:
        if plan.sharded:
            optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.5)
            ddp = torchddp.ShardedDataParallel(model, optimizer, reduce_buffer_size=250, transport="shm")
        else:
            ddp = ddp_class(model, bucket_cap_mb=0.001, transport="shm")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(STEPS):
            calls["step"][0] = step
            calls["buffers"]()
            loss = ddp(rank, step)
            assert model.step[0].item() == step + 1
            optimizer.zero_grad()
            loss.backward()
            for index, weight in enumerate(model.weights):
                if plan.sharded and optimizer.param_to_rank[weight] != rank:
                    assert weight.grad is None
                    continue
                want = sum(stamp(r, step, index) for r in range(plan.world_size)) / plan.world_size
                torch.testing.assert_close(weight.grad, want, rtol=1e-5, atol=0)
            seen["steps"] += 1
            calls["optimizer"]()
            optimizer.step()
        if rank == plan.victim:
            time.sleep(1)  # the longest delay
    except RuntimeError as error:
        seen.update(types=[c.__name__ for c in type(error).__mro__], text=str(error), time_s=time.monotonic())
    return seen


def run(ddp_class: type, plan: Kill) -> tuple[list[str], set[str]]:
    """What was wrong, and the segments there were."""
    survivors = [rank for rank in range(plan.world_size) if rank != plan.victim]
    with tempfile.TemporaryDirectory(prefix="torchddp_test_") as name:
        folder = Path(name)
        outcomes = run_outcomes(
            train, plan.world_size, ddp_class, plan, folder, needed_ranks=survivors, timeout=20, straggler_s=5
        )
        log = folder / "death"
        written = log.read_text() if log.exists() else ""  # not if the survivors needed it no more
        died_s = float(written) if written else None
    wrong = []
    segments: set[str] = set()
    for rank in survivors:
        seen = outcomes[rank].value
        if not outcomes[rank].ok:
            wrong.append(f"rank {rank}: {outcomes[rank].error}")
            continue
        segments |= seen["segments"]
        if seen["steps"] == STEPS and not seen["types"]:
            continue  # it needed nothing more of the dead
        if died_s is None:
            wrong.append(f"rank {rank}, before the kill: {seen['text']}")
            continue
        late_s = seen["time_s"] - died_s
        if "TransportError" not in seen["types"] or not re.search(rf"rank {plan.victim}\b", seen["text"]):
            wrong.append(f"rank {rank}: {seen['types']}: {seen['text']}")
        if late_s > NOTICED_S:
            wrong.append(f"rank {rank} noticed after {late_s:.1f} s: {seen['text']}")
    return wrong, segments


@pytest.mark.slow
def test_survivors_of_a_sharded_run_name_the_dead():
    files = shared_files()
    failures = []
    for seed in range(NUM_SHARDED_KILLS):
        plan = dataclasses.replace(kill(1000 + seed), sharded=True)
        wrong, mapped = run(torchddp.ShardedDataParallel, plan)
        failures += [f"{plan}: {text}" for text in wrong]
        assert len(failures) < 5 and not holders_of(mapped), "\n".join(failures)
    assert not failures, "\n".join(failures)
    assert shared_files() == files


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_survivors_of_200_kills_name_the_dead_and_leave_nothing(ddp_class):
    files = shared_files()
    started_s = time.monotonic()
    failures = []
    segments: set[str] = set()
    for seed in range(NUM_KILLS):
        plan = kill(seed)
        wrong, mapped = run(ddp_class, plan)
        failures += [f"{plan}: {text}" for text in wrong]
        segments |= mapped
        assert len(failures) < 20, "\n".join(failures)
    took_s = time.monotonic() - started_s
    assert not failures, "\n".join(failures)
    assert len(segments) > 2 * NUM_KILLS and not holders_of(segments)
    assert shared_files() == files
    assert took_s < BUDGET_S, f"{took_s:.0f} s"
