"""`record_profile` on real ranks: what a small step costs besides computing is in the profile, so the model fits it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import run_ranks
from torchddp import DistributedDataParallel
from torchddp.plan.record_profile import record_profile
from torchddp.simulate.predict import model_error

SLEEP_S = 0.05


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_the_model_fits_a_small_step_with_overhead_and_a_late_rank(transport: str) -> None:
    def work(rank: int) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        ddp = DistributedDataParallel(layers, transport=transport)
        inputs = torch.ones(2, 16)
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            # One of them is late in each step, before its forward begins.
            if steps % 2 == rank:
                time.sleep(SLEEP_S)
            ddp(inputs).sum().backward()

        profile = record_profile(ddp, step, steps=4)
        assert steps >= 4 + 2 * 4
        assert 0.8 * SLEEP_S < profile.overhead_s < 3 * SLEEP_S, profile
        error = model_error(profile)
        assert error is not None and abs(error) < 0.4, profile
        everyone: list[object] = [None, None]
        dist.all_gather_object(everyone, profile.to_dict())
        assert everyone[0] == everyone[1]

    run_ranks(work, 2)


def test_of_short_steps_more_are_recorded() -> None:
    def work(rank: int) -> None:
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1
            ddp(torch.ones(1, 4)).sum().backward()

        record_profile(ddp, step, steps=1)
        assert steps > 4 + 2 * 4
        with pytest.raises(ValueError, match="steps must be at least 1"):
            record_profile(ddp, step, steps=0)

    run_ranks(work, 2)
